"""CPU seconds of a run: of each file of tests and of all processes that it started.

As root, a process of pytest puts itself into a cgroup of its own, which counts all its descendants.
Elsewhere the times of its processes and of those that they waited for are added; processes that
were orphaned and have ended are missing there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.support import traces

EACH_TEST = "ALCHEMIST_TEST_COSTS"
SLOWEST = 10  # files in the summary
BUDGET = "ALCHEMIST_TEST_BUDGET"  # CPU seconds that a run may take, in turns of `loop_s`
TICKS = os.sysconf("SC_CLK_TCK")
GROUPS = Path("/sys/fs/cgroup")


class Meter:
    """CPU seconds of this process and of its descendants."""

    def __init__(self) -> None:
        self._counter: Path | None = None
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                hierarchy, counter = GROUPS, "cpu.stat"
            elif "cpuacct" in controllers.split(","):
                hierarchy, counter = GROUPS / controllers, "cpuacct.usage"
            else:
                continue
            group = hierarchy / path.lstrip("/") / f"alchemist-tests-{os.getpid()}"
            with suppress(OSError):
                group.mkdir()
                (group / "cgroup.procs").write_text(str(os.getpid()))
                (group / counter).read_bytes()
                self._counter = group / counter
                break

    def cpu_s(self) -> float:
        if self._counter is None:
            return sum(map(_own_and_waited_for_s, (os.getpid(), *traces.processes())))
        words = self._counter.read_text().split()
        return int(words[0]) / 1e9 if len(words) == 1 else int(words[1]) / 1e6  # usage_usec

    def close(self) -> None:
        """Return to the parent group; the processes of the run have ended."""
        if self._counter is not None:
            group = self._counter.parent
            with suppress(OSError):
                (group.parent / "cgroup.procs").write_text(str(os.getpid()))
                group.rmdir()


def _own_and_waited_for_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def loop_s() -> float:
    """CPU seconds of a fixed loop of NumPy: what this machine's CPU seconds are worth."""
    a = np.arange(1e5)
    times = []
    for _ in range(3):
        begun = time.thread_time()
        for _ in range(1000):
            a = np.sqrt(a * a + 1.0)
        times.append(time.thread_time() - begun)
    return min(times)


class Files:
    """What each file of tests has cost in this process: seconds, and CPU seconds.

    If the variable `EACH_TEST` names a file, the costs of each test are appended to it.
    """

    def __init__(self) -> None:
        self._meter = Meter()
        self._test = ""
        self._each = os.environ.get(EACH_TEST)
        self._since = self._now()
        self.costs: dict[str, tuple[float, float]] = {}

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), self._meter.cpu_s()

    def enter(self, test: str) -> None:
        """Count for this test's file from now on."""
        file = _file(self._test)
        if self._each is None and _file(test) == file:
            return
        now = self._now()
        wall_s, cpu_s = now[0] - self._since[0], now[1] - self._since[1]
        add(self.costs, {file: (wall_s, cpu_s)})
        if self._each is not None:
            with open(self._each, "a") as log:
                log.write(f"{cpu_s:.3f} {wall_s:.3f} {self._test}\n")
        self._test, self._since = test, now

    def close(self) -> dict[str, tuple[float, float]]:
        self.enter("")
        self._meter.close()
        return self.costs


def _file(test: str) -> str:
    return test.partition("::")[0]


def add(costs: dict[str, tuple[float, float]], more: Mapping[str, tuple[float, float]]) -> None:
    """Add the costs of files to those that were found before."""
    for file, (wall_s, cpu_s) in more.items():
        before = costs.get(file, (0.0, 0.0))
        costs[file] = (before[0] + wall_s, before[1] + cpu_s)


def summary(reporter: pytest.TerminalReporter, costs: dict[str, tuple[float, float]]) -> None:
    """Print the files that took longest, and the CPU seconds of all."""
    all_s = sum(cpu_s for _, cpu_s in costs.values())
    turns = all_s / loop_s()
    reporter.section("time")
    files = sorted(costs.items(), key=lambda item: -item[1][0])
    for file, (wall_s, cpu_s) in files[:SLOWEST]:
        reporter.write_line(f"{wall_s:7.1f} s, CPU {cpu_s:6.1f} s  {file or '(outside of tests)'}")
    reporter.write_line(f"CPU of all files: {all_s:.0f} s, {turns:.0f} turns of a loop of NumPy")
    budget = float(os.environ.get(BUDGET, "inf"))
    if turns > budget:
        reporter.write_line(f"WARNING: more than the budget of {budget:.0f} turns", yellow=True)
