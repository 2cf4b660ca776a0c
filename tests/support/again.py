"""The second try of tests that have failed: alone, at the end of the run.

``make test`` runs pytest again with ``--last-failed``. A test that passes then is printed as flaky
with the log of its failure, and the run passes. The second run fails if the first has left
something behind or could not collect all tests: no test that passes alone mends that.
"""

from __future__ import annotations

import pytest

LEFT = "the tests have left behind:"
FAILURES, FINAL = "alchemist/failures", "alchemist/final"
LOG_LINES = 60  # of each failure


def summary(reporter: pytest.TerminalReporter) -> None:
    """Keep the failures of a first run; tell after a second one which of them were flaky."""
    failed: dict[str, str] = {}
    final: list[str] = []
    for outcome in ("failed", "error"):
        for report in reporter.stats.get(outcome, []):
            if isinstance(report, pytest.CollectReport) or LEFT in report.longreprtext:
                final.append(report.longreprtext)
            else:
                failed[report.nodeid] = report.longreprtext
    cache: pytest.Cache | None = getattr(reporter.config, "cache", None)
    if cache is None:  # -p no:cacheprovider
        return
    if not _second(reporter.config):
        cache.set(FAILURES, failed)
        cache.set(FINAL, final)
        return
    before: dict[str, str] = cache.get(FAILURES, {})
    _tell(
        reporter,
        "flaky, which failed at first and passed alone",
        {name: log for name, log in before.items() if name not in failed},
    )
    _tell(reporter, "not mended by a second try", dict.fromkeys(cache.get(FINAL, []), ""))


def _tell(reporter: pytest.TerminalReporter, title: str, logs: dict[str, str]) -> None:
    if logs:
        reporter.section(f"{title}: {len(logs)}")
    for name, log in logs.items():
        reporter.write_line(name, yellow=True)
        for line in log.splitlines()[-LOG_LINES:]:
            reporter.write_line(f"    {line}")


def cannot_be_mended(config: pytest.Config) -> bool:
    """Whether this is a second run, which passes though the first has failed as a whole."""
    cache: pytest.Cache | None = getattr(config, "cache", None)
    return _second(config) and cache is not None and bool(cache.get(FINAL, []))


def _second(config: pytest.Config) -> bool:
    return bool(config.getoption("lf", default=False))
