"""How a run is divided, how long its tests are, and the summary at its end.

``make test`` starts three workers of pytest-xdist. A worker runs the files of one *unit* in order:
files that share a gang, a Spark or a cluster of their own stay together. Each worker has a Ray
cluster, a temporary folder and a mark for its processes, so that its final check sees only its
own leftovers.

``make test`` runs short versions of fuzzers, property tests and random programs. ``make test-long``
sets ``ALCHEMIST_TEST_LONG=1``.
"""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import pytest
from xdist.scheduler import LoadScopeScheduling

# Folders and files that are one unit, and files that take long, the longest first: the last unit
# to start determines how long one worker waits for the other.
UNITS = (
    ("tests/deploy/slurm",),
    ("tests/deploy/container",),
    # Before other faults, which leave gangs to the end: tests of named gangs need the CPUs.
    ("tests/faults/named",),
    ("tests/faults/recovery",),
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
    ("tests/sessions",),
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


T = TypeVar("T")
LONG = os.environ.get("ALCHEMIST_TEST_LONG", "") not in ("", "0")


def scaled(short: T, long: T) -> T:
    """Return ``long`` under ``make test-long``, else ``short``."""
    return long if LONG else short


def part(rows: Sequence[T], turn: int, of: int) -> Sequence[T]:
    """Return every `of`-th row, the first of them by `turn`; under ``make test-long`` all rows.

    A table of functions and arguments takes another turn for each function: every function and
    every argument is tested, and neighbours share the combinations.
    """
    return rows if LONG else rows[turn % of :: of]


FAULT = "fault"  # key of a report's property: fault, seconds to the error, to the cleanup, error


def skipped(reporter: pytest.TerminalReporter) -> None:
    """List why tests were skipped, with the number of tests in each file."""
    files: dict[str, Counter[str]] = {}
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        reason = textwrap.shorten(reason.removeprefix("Skipped: "), 240, placeholder=" ...")
        files.setdefault(reason, Counter())[report.nodeid.partition("::")[0]] += 1
    if not files:
        return
    total = sum(counts.total() for counts in files.values())
    reporter.section(f"skipped: {total}", yellow=True)
    for reason, counts in sorted(files.items(), key=lambda item: -item[1].total()):
        reporter.write_line(f"{counts.total():4d}  {reason}")
        for file, count in sorted(counts.items()):
            reporter.write_line(f"          {count:4d}  {file}")


def faults(reporter: pytest.TerminalReporter) -> None:
    """Print the table of the fault tests: times to the error and to a clean machine."""
    rows = [
        value
        for reports in reporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == FAULT
    ]
    if not rows:
        return
    reporter.section("faults")
    reporter.write_line(f"{'fault':<58} {'error after':>11} {'clean after':>11}  error")
    for fault, error_s, clean_s, error in rows:
        clean = "-" if clean_s is None else f"{clean_s:.3f} s"
        reporter.write_line(f"{fault:<58} {f'{error_s:.3f} s':>11} {clean:>11}  {error}")
