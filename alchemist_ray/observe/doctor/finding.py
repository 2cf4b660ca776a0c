"""Findings of checks, and their concurrent execution with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from alchemist_ray.deploy.slurm.sites import Site

OK, INFO, WARN, BAD = "ok", "info", "warn", "bad"
STATUSES = (OK, INFO, WARN, BAD)
LIMIT_S = 10.0  # for one check on one node


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report.

    Attributes
    ----------
    check : str
        Name of the check.
    status : {"ok", "info", "warn", "bad"}
        `bad` prevents gangs from working, `warn` makes them slow, fragile or unsafe.
    message : str
        The observation.
    advice : str
        Remedy; every `warn` and `bad` has one.
    where : str
        The node; empty for all.
    """

    check: str
    status: str
    message: str
    advice: str = ""
    node: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}; got {self.status!r}")
        if self.status in (WARN, BAD) and not self.advice:
            raise ValueError(f"{self.check}: a finding that is {self.status} needs advice")

    def on(self, where: str) -> Finding:
        """Return the same finding for a node."""
        return replace(self, node=where)

    def to_map(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Expected:
    """Expectations from a site file; empty values expect nothing.

    Attributes
    ----------
    site : str
    interface : tuple of str
        Names or patterns, best first.
    library : str
        The vendor's libmpi; may name environment variables.
    launcher, pmi : str
    """

    site: str = ""
    interface: tuple[str, ...] = ()
    library: str = ""
    launcher: str = ""
    pmi: str = ""

    @classmethod
    def of(cls, site: Site | None) -> Expected:
        if site is None:
            return cls()
        mpi = site.mpi
        return cls(site.name, site.nodes.interface, mpi.library, mpi.launcher, mpi.pmi)


Check = Callable[[Expected], Iterable[Finding]]


def run_checks(
    checks: Mapping[str, Check], expected: Expected, limit_s: float = LIMIT_S
) -> list[Finding]:
    """Run checks concurrently and return their findings in the order of the checks.

    A check that exceeds `limit_s` (on a file system that does not answer) or raises is a finding.
    """
    found: dict[str, list[Finding]] = {}

    def one(name: str, check: Check) -> None:
        try:
            found[name] = list(check(expected))
        except Exception as error:  # a check must not end the others
            found[name] = [
                Finding(
                    name, WARN, f"the check failed: {type(error).__name__}: {error}",
                    "check by hand; if the node is fine, this is a bug of alchemist doctor",
                )
            ]  # fmt: skip

    threads = [
        threading.Thread(target=one, args=item, daemon=True, name=item[0])
        for item in checks.items()
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = Finding(
        "", BAD, f"no answer in {limit_s:g} s",
        "a network file system, a name server or a started program does not answer",
    )  # fmt: skip
    return [f for name in checks for f in found.get(name, [replace(late, check=name)])]


def to_map(findings: Iterable[Finding]) -> list[dict[str, str]]:
    return [finding.to_map() for finding in findings]


def from_map(told: Iterable[Mapping[str, Any]]) -> list[Finding]:
    return [Finding(**one) for one in told]
