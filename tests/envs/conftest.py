"""Environments over the pendulum, closed after their test; and gangs that must be gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="needs gymnasium: pip install 'alchemist-on-ray[envs]'")

from envs import HPCSimulatorEnv, HPCSimulatorVectorEnv, simulation
from tests.support import warm_workers

PENDULUM = str(Path(__file__).with_name("pendulum.py"))
CONFIG = {"lib_name": "pendulum", "lib_path": PENDULUM}


@pytest.fixture(scope="session")
def rllib(cluster: str) -> None:
    """For files that train: the cluster's workers are forked with RLlib's packages imported."""
    warm_workers.import_for_rllib()


@pytest.fixture(autouse=True)
def _does_not_replace_what_other_tests_lost() -> None:
    simulation.unreplaced.clear()


def closing(kind: Callable[..., Any], config: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Makes environments: options of the simulator, then keys of the config; closes them."""
    made: list[Any] = []

    def make(sim: dict[str, Any] | None = None, **options: Any) -> Any:
        made.append(kind({**config, "sim": sim or {}}, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture
def make(cluster: str) -> Iterator[Callable[..., HPCSimulatorEnv]]:
    """Makes environments of the pendulum, see `closing`."""
    yield from closing(HPCSimulatorEnv, CONFIG)


@pytest.fixture
def make_vector(cluster: str) -> Iterator[Callable[..., HPCSimulatorVectorEnv]]:
    """The same for a vector environment."""
    yield from closing(HPCSimulatorVectorEnv, CONFIG)
