"""The end of a program closes each of its sessions; one that is collected gives its gang back."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from tests.support import commands, traces

PROGRAM = """
from alchemist_ray.session import owner

closed = []

class Session:
    def __init__(self, name):
        self.name = name

    def close(self):
        closed.append(self.name)
        if self.name == "first":
            raise RuntimeError("it cannot be closed")

sessions = [Session("first"), Session("second")]
for session in sessions:
    owner._sessions.add(session)
owner._close_all()
print(sorted(closed))
owner._sessions.clear()
"""


def test_a_session_that_cannot_be_closed_keeps_no_other_open() -> None:
    done = commands.python(PROGRAM)
    assert done.stdout == "['first', 'second']\n", done.stderr
    assert "was not closed in good order" in done.stderr


def test_a_session_that_is_collected_gives_its_gang_back(cluster: str) -> None:
    """A cell of a notebook that runs twice had two gangs."""
    before = len(AlchemistSession.list())

    def given_back() -> bool:
        return len(AlchemistSession.list()) == before

    als: AlchemistSession | None = AlchemistSession(1)
    assert als is not None
    A = als.send_matrix(np.ones((300, 300)))
    norm = als.load_library("linalg").norm
    als = None
    gc.collect()
    time.sleep(0.5)
    assert A.fetch().sum() == 90000  # a handle needs the gang, and so does a routine
    assert norm(A) == 300
    del A
    gc.collect()
    assert len(AlchemistSession.list()) == before + 1
    del norm
    with pytest.warns(ResourceWarning, match="was not closed"):
        gc.collect()
    assert traces.wait_until(given_back, 20) is not None


@pytest.mark.parametrize("cycle", [False, True])
def test_a_task_that_fails_without_closing_its_session_leaves_no_gang(
    cluster: str, cycle: bool
) -> None:
    before = len(AlchemistSession.list())

    @ray.remote(num_cpus=0, max_retries=0)
    def task() -> None:
        als = AlchemistSession(1)
        als.send_matrix(np.eye(3))
        if cycle:
            both: list[Any] = [als]
            both.append(both)
        raise ValueError("the task has failed")

    with pytest.raises(ValueError, match="the task has failed"):
        ray.get(task.remote(), timeout=60)
    assert traces.wait_until(lambda: len(AlchemistSession.list()) == before, 30) is not None
