"""Environments over the pendulum, closed after their test; and gangs that must be gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="needs gymnasium: pip install 'alchemist-on-ray[envs]'")

from envs import HPCSimulatorEnv, HPCSimulatorVectorEnv, simulation

PENDULUM = str(Path(__file__).with_name("pendulum.py"))


@pytest.fixture(autouse=True)
def _does_not_replace_what_other_tests_lost() -> None:
    simulation.unreplaced.clear()


def _made(kind: type[Any]) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(sim: dict[str, Any] | None = None, **options: Any) -> Any:
        config = {"lib_name": "pendulum", "lib_path": PENDULUM, "sim": sim or {}}
        made.append(kind(config, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture
def make(cluster: str) -> Iterator[Callable[..., HPCSimulatorEnv]]:
    """Makes an environment: options of the pendulum, then keys of the config."""
    yield from _made(HPCSimulatorEnv)


@pytest.fixture
def make_vector(cluster: str) -> Iterator[Callable[..., HPCSimulatorVectorEnv]]:
    """The same for a vector environment."""
    yield from _made(HPCSimulatorVectorEnv)
