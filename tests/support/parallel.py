"""Distributes the tests over the workers of pytest-xdist (`make test` starts two).

A worker runs the files of one *unit* in order: files that share a gang, a Spark or a cluster of
their own stay together. Each worker has a Ray cluster, a temporary folder and a mark for its
processes, so that its final check sees only its own leftovers.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# Folders and files that are one unit, and files that take long, the longest first: the last unit
# to start determines how long one worker waits for the other.
UNITS = (
    ("tests/deploy/slurm",),
    ("tests/deploy/container",),
    # Before those of faults that have a cluster or a Spark of their own and leave gangs: tests of
    # named gangs need the CPUs.
    ("tests/faults",),
    ("tests/alchemist_ray/clients/spark", "tests/faults/test_spark.py"),
    ("tests/faults/test_hosts.py",),
    ("tests/faults/recovery/test_lost_hosts.py",),
    ("tests/faults/test_gateway_hosts.py",),
    ("tests/faults/test_head.py",),
    ("tests/envs/test_rllib.py",),
    ("tests/docs/test_examples.py",),
    ("tests/docs/test_notebooks.py",),
    ("tests/ali/test_files.py",),
    ("tests/ali/test_conformance.py",),
    ("tests/soak",),
    ("tests/ali/test_scalapack.py",),
    ("tests/alchemist_ray/observe/test_doctor_nodes.py",),
    ("tests/alchemist_ray/deploy/slurm/test_run.py",),
    ("tests/envs/test_train.py",),
    ("tests/envs/test_faults.py",),
    ("tests/alchemist_ray/arrays",),
)


def unit(nodeid: str) -> int | str:
    """Return the unit of a test: its place in `UNITS` by the longest name, or its file."""
    file = nodeid.partition("::")[0]
    found = [
        (len(name), place)
        for place, names in enumerate(UNITS)
        for name in names
        if file == name or file.startswith(f"{name}/")
    ]
    return max(found)[1] if found else file


def position(nodeid: str) -> int:
    """Return when a test's unit starts: `UNITS` in order, then all other files."""
    found = unit(nodeid)
    return found if isinstance(found, int) else len(UNITS)


class UnitScheduling(LoadScopeScheduling):
    """Assigns units to workers in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return str(unit(nodeid))


class Turns:
    """Lets one test at a time have the machine for itself.

    Every test takes a shared lock, one that is marked ``alone`` an exclusive lock. The gate in
    front of it keeps the other workers from starting more tests while such a test waits.
    """

    def __init__(self, folder: str) -> None:
        self._gate, self._lock = (Path(folder, name) for name in ("gate", "lock"))

    @contextlib.contextmanager
    def turn(self, alone: bool) -> Iterator[None]:
        """Wait for a turn and hold it."""
        with open(self._lock, "w") as lock:
            with open(self._gate, "w") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a forked child has it too
