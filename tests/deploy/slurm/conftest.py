"""A Slurm of three nodes for all tests here, and what must be true of its nodes after each job.

The tests follow each other on it; `test_vanished.py` comes last and leaves it in pieces.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from tests.deploy.slurm.cluster import LIVES, Slurm, why_not
from tests.faults.hosts import Host
from tests.support import traces
from tests.support.commands import ALCHEMIST

REASON = why_not()
START_S = 250.0  # for Ray to come up on a machine that others use too
SUBMIT = ("submit", "-t", 10, "--start-timeout", START_S)
CLEAN_S = 15.0
PROGRAM = (sys.executable, "-m", "tests.deploy.slurm.programs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "slurm" and item.path.parent.parent.name == "deploy":
            item.add_marker(pytest.mark.root)
            item.add_marker(pytest.mark.timeout(420, func_only=True))
            if REASON is not None:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def _patience() -> None:
    """These tests have minutes: no stacks of threads at the suite's own time."""
    faulthandler.cancel_dump_traceback_later()


class Submitted:
    """A job that was submitted: what it has said so far, and how it ended."""

    def __init__(self, slurm: Slurm, told: str) -> None:
        self._slurm = slurm
        words = dict(line.split(" ", 1) for line in told.splitlines())
        self.number, self.script = words["job"], words["script"]
        self._log = words["log"]

    @property
    def log(self) -> str:
        try:
            with open(self._log) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def told(self, name: str) -> Any:
        """The value that its program has reported under this name, or None."""
        for line in self.log.splitlines():
            if line.startswith(f"TOLD {name} "):
                return json.loads(line.split(" ", 2)[2])
        return None

    def wait_told(self, name: str, limit_s: float = START_S) -> Any:
        """Wait until it has. Fails with its log."""
        if traces.wait_until(lambda: self.told(name) is not None, limit_s, 0.1) is None:
            pytest.fail(f"job {self.number} did not tell {name!r}:\n{self.log}", pytrace=False)
        return self.told(name)

    def wait(self, limit_s: float = START_S, lives: Collection[str] = LIVES) -> int:
        """Wait until it is over: its exit code."""
        try:
            about = self._slurm.wait(self.number, limit_s, lives)
        except TimeoutError as error:
            pytest.fail(f"{error}:\n{self.log}", pytrace=False)
        self.code = int(about["ExitCode"].partition(":")[0])
        return self.code


@pytest.fixture(scope="package")
def slurm() -> Iterator[Slurm]:
    """A Slurm of three nodes with 4 CPUs each."""
    with Slurm(3) as cluster:
        yield cluster


@pytest.fixture
def submit(slurm: Slurm) -> Iterator[Any]:
    """Submits a program of `programs.py`: ``submit("-N", 2, program=["name", ...])``."""
    jobs: list[Submitted] = []

    def submit(*options: Any, program: list[str], system: str = "slurm") -> Submitted:
        words = [*ALCHEMIST, system, *SUBMIT, *options, "--", *PROGRAM, *program]
        jobs.append(Submitted(slurm, slurm.login(*words)))
        return jobs[-1]

    yield submit
    for job in jobs:
        slurm.login("scancel", job.number, check=False)


def left_on(host: Host) -> list[str]:
    """Leftovers of a job on a node: processes, folders, shared memory."""
    known = ("tests.faults.hosts", "slurmd", "ps -ww")
    lines = host.run("ps", "-ww", "-eo", "stat=,args=").splitlines()
    processes = [
        line
        for line in lines
        if not line.startswith("Z") and not any(word in line for word in known)
    ]
    files = host.run("sh", "-c", "ls -d /tmp/alch* /tmp/ray /dev/shm/* 2>/dev/null || true")
    return processes + files.split()


def assert_clean(hosts: list[Host]) -> None:
    """Nothing of any job is left on these nodes, or soon will be."""
    left: dict[str, list[str]] = {}

    def clean() -> bool:
        left.clear()
        left.update({host.name: found for host in hosts if (found := left_on(host))})
        return not left

    if traces.wait_until(clean, CLEAN_S, 0.2) is None:
        pytest.fail(f"left behind: {json.dumps(left, indent=1)}", pytrace=False)
