"""Shared by the tests of named gangs: what exists, a clean-up, and another program."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    SessionError,
)
from alchemist_ray.runtime.driver import find_driver
from alchemist_ray.runtime.names import GROUP_PREFIX
from tests.faults.conftest import assert_clean, left
from tests.support import traces

ROOT = Path(__file__).parents[2]
END_LIMIT_S = 5.0


def actors() -> set[str]:
    return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}


def managers() -> set[str]:
    return {name for name in actors() if name.startswith(GROUP_PREFIX)}


def gangs() -> dict[str, str]:
    return {gang.name: gang.state for gang in AlchemistSession.list()}


@pytest.fixture
def nothing_of_it_left(cluster: str) -> Iterator[None]:
    """After a test no process, file, reservation or manager of its gangs is left."""
    ray.get(find_driver().prewarm.remote())
    with AlchemistSession():  # the manager that the process keeps
        before, known = left(), managers()
    yield
    for name in gangs():
        with contextlib.suppress(SessionError):  # it has just ended
            AlchemistSession.stop_gang(name)
    assert traces.wait_until(lambda: managers() <= known, END_LIMIT_S) is not None, managers()
    assert_clean(before)


@pytest.fixture
def climate(nothing_of_it_left: None) -> Iterator[AlchemistSession]:
    """A detached gang with a matrix and a library, and the session that has started it."""
    with AlchemistSession(2, name="climate", lifetime="detached") as session:
        session.send_matrix(np.arange(12.0).reshape(4, 3), name="A")
        session.load_library("linalg")
        yield session


class Program:
    """A program of its own on the cluster, that prints one line when it is ready."""

    def __init__(self, address: str, text: str, **init: Any) -> None:
        begin = f"import ray\nray.init(address={address!r}, log_to_driver=False, **{init!r})\n"
        begin += "from alchemist_ray import AlchemistSession\nimport numpy as np, time\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin + textwrap.dedent(text)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.said = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
