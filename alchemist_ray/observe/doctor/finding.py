"""Findings of checks, their concurrent execution with a time limit, and the report."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, replace
from functools import partial

from alchemist_ray.background import in_thread
from alchemist_ray.deploy.slurm.sites import Site
from alchemist_ray.plural import counted, listed

OK, INFO, WARN, BAD = "ok", "info", "warn", "bad"
LIMIT_S = 10.0  # for one check on one node


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report.

    Attributes
    ----------
    status : {"ok", "info", "warn", "bad"}
        `bad` prevents gangs from working, `warn` makes them slow, fragile or unsafe.
    message : str
        The observation.
    advice : str
        Remedy; every `warn` and `bad` has one, and it is dropped from the others.
    check : str
        Name of the check; `run_checks` adds the one of the table.
    node : str
        The node; empty for all.
    """

    status: str
    message: str
    advice: str = ""
    check: str = ""
    node: str = ""

    def __post_init__(self) -> None:
        if self.status in (OK, INFO):
            object.__setattr__(self, "advice", "")
        elif not self.advice:
            raise ValueError(f"{self.check}: a finding that is {self.status} needs advice")


def graded(
    value: float, least: float, good: float, message: str, advice: str, check: str = ""
) -> Finding:
    """Return a finding that is bad below `least`, and a warning below `good`."""
    status = BAD if value < least else WARN if value < good else OK
    return Finding(status, message, advice, check)


def warn_if(wrong: object, problem: str, advice: str, fine: str) -> Finding:
    """Return a warning if something is wrong, and else that it is `fine`."""
    return Finding(WARN, problem, advice) if wrong else Finding(OK, fine)


def named(check: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the name of their check, if they have no other."""
    return [replace(found, check=found.check or check) for found in findings]


NOTHING = Site("")  # expects nothing
Check = Callable[[Site], Iterable[Finding]]


def run_checks(checks: Mapping[str, Check], site: Site, limit_s: float = LIMIT_S) -> list[Finding]:
    """Run checks concurrently and return their findings in the order of the checks.

    A check that exceeds `limit_s` (on a file system that does not answer) or raises is a finding.
    """
    late = Finding(
        BAD, f"no answer in {limit_s:g} s",
        "a network file system, a name server or a started program does not answer",
    )  # fmt: skip
    found: dict[str, list[Finding]] = {}

    def one(name: str, check: Check) -> None:
        try:
            found[name] = list(check(site))
        except subprocess.TimeoutExpired:
            found[name] = [late]
        except Exception as error:  # a check must not end the others
            found[name] = [
                Finding(
                    WARN, f"the check failed: {type(error).__name__}: {error}",
                    "check by hand; if the node is fine, this is a bug of alchemist doctor",
                )
            ]  # fmt: skip

    wait([in_thread(partial(one, *item)) for item in checks.items()], limit_s)
    return [f for name in checks for f in named(name, found.get(name, [late]))]


WIDTH = 100
NAMED = 3  # nodes
STATUS_WIDTH, CHECK_WIDTH = 4, 26


def verdict(findings: Iterable[Finding]) -> str:
    """Return the worst of ok, warn and bad."""
    found = {finding.status for finding in findings}
    return next((status for status in (BAD, WARN) if status in found), OK)


def as_json(findings: Sequence[Finding], nodes: Sequence[str]) -> str:
    """Return the report for programs."""
    told = {
        "status": verdict(findings), "nodes": list(nodes), "findings": [*map(asdict, findings)],
    }  # fmt: skip
    return json.dumps(told, indent=1) + "\n"


def table(findings: Sequence[Finding], nodes: Sequence[str]) -> str:
    """Return the report for people: each finding, and its remedy below."""
    places: dict[Finding, list[str]] = {}
    for found in findings:
        places.setdefault(replace(found, node=""), []).append(found.node)
    order = list(dict.fromkeys(found.check for found in findings))
    lines = []
    for found in sorted(places, key=lambda found: order.index(found.check)):
        text = f"{_places(places[found], nodes)}{found.message}"
        lines += _block(found.status, found.check, text)
        if found.advice:
            lines += _block("", "", f"-> {found.advice}")
    bad, warned = (sum(f.status == status for f in findings) for status in (BAD, WARN))
    lines.append(f"{counted(len(nodes), 'node')}: {bad} bad, {counted(warned, 'warning')}")
    return "\n".join(lines) + "\n"


def _places(where: Sequence[str], nodes: Sequence[str]) -> str:
    where = [place for place in where if place]
    if not where or len(nodes) == 1:
        return ""
    if len(where) == len(nodes):
        return f"all {len(nodes)} nodes: "
    return f"{listed(where, NAMED)}: "


def _block(status: str, check: str, text: str) -> list[str]:
    head = f"{status:{STATUS_WIDTH}} {check:{CHECK_WIDTH}} "
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]  # fmt: skip
