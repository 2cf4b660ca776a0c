"""Sections at the end of a run: skipped tests by reason, and the times of the fault tests."""

from __future__ import annotations

import textwrap
from collections import Counter

import pytest

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
