"""The second try of tests that have failed: alone, at the end of the run.

``make test`` runs pytest again with ``--last-failed``. A test that passes then is printed as flaky
with the log of its failure, and the run passes. The second run fails if the first has left
something behind: a test that passes alone is no excuse for that.
"""

from __future__ import annotations

import pytest

LEFT = "the tests have left behind:"
FAILURES = "alchemist/failures"
LOG_LINES = 60  # of each failure


def summary(reporter: pytest.TerminalReporter) -> None:
    """Keep the failures of a first run; tell after a second one which of them were flaky."""
    failed = {
        report.nodeid: report.longreprtext
        for outcome in ("failed", "error")
        for report in reporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport)
    }
    if not _second(reporter.config):
        if cache := _cache(reporter.config):
            cache.set(FAILURES, failed)
        return
    before = _first_failures(reporter.config)
    flaky = {name: log for name, log in before.items() if name not in failed}
    if flaky:
        reporter.section(f"flaky: {len(flaky)}, which failed at first and passed alone")
    for name, log in flaky.items():
        reporter.write_line(name, yellow=True)
        for line in log.splitlines()[-LOG_LINES:]:
            reporter.write_line(f"    {line}")


def first_run_left_something(config: pytest.Config) -> bool:
    """Whether this is the second run, and the check for leftovers has failed in the first."""
    return _second(config) and any(LEFT in log for log in _first_failures(config).values())


def _second(config: pytest.Config) -> bool:
    return bool(config.getoption("lf", default=False))


def _cache(config: pytest.Config) -> pytest.Cache | None:
    return getattr(config, "cache", None)  # none with `-p no:cacheprovider`


def _first_failures(config: pytest.Config) -> dict[str, str]:
    cache = _cache(config)
    found: dict[str, str] = cache.get(FAILURES, {}) if cache else {}
    return found
