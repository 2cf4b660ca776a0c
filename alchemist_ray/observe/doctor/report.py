"""The report: JSON, or a table with one line for equal findings of several nodes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence

from alchemist_ray.observe.doctor.finding import BAD, STATUSES, WARN, Finding, to_map
from alchemist_ray.plural import counted

WIDTH = 100
NAMED = 3  # nodes
STATUS_WIDTH, CHECK_WIDTH = 4, 26


def verdict(findings: Iterable[Finding]) -> str:
    """Return the worst of ok, warn and bad."""
    worst = max((STATUSES.index(f.status) for f in findings), default=0)
    return STATUSES[worst] if STATUSES[worst] in (WARN, BAD) else STATUSES[0]


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if a finding is bad, else 0."""
    return int(verdict(findings) == BAD)


def as_json(findings: Sequence[Finding], nodes: Sequence[str]) -> str:
    """Return the report for programs."""
    told = {"status": verdict(findings), "nodes": list(nodes), "findings": to_map(findings)}
    return json.dumps(told, indent=1) + "\n"


def table(findings: Sequence[Finding], nodes: Sequence[str]) -> str:
    """Return the report for people: each finding, and its remedy below."""
    together: dict[tuple[str, str, str, str], list[str]] = {}
    for f in findings:
        together.setdefault((f.check, f.status, f.message, f.advice), []).append(f.node)
    order = list(dict.fromkeys(f.check for f in findings))
    lines = []
    for (check, status, message, advice), where in sorted(
        together.items(), key=lambda item: order.index(item[0][0])
    ):
        text = f"{_places(where, nodes)}{message}"
        lines += _block(status, check, text)
        if advice:
            lines += _block("", "", f"-> {advice}")
    bad, warned = (sum(f.status == status for f in findings) for status in (BAD, WARN))
    lines.append(f"{counted(len(nodes), 'node')}: {bad} bad, {counted(warned, 'warning')}")
    return "\n".join(lines) + "\n"


def _places(where: Sequence[str], nodes: Sequence[str]) -> str:
    named = [place for place in where if place]
    if not named or len(nodes) == 1:
        return ""
    if len(named) == len(nodes):
        return f"all {len(nodes)} nodes: "
    rest = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    return f"{', '.join(named[:NAMED])}{rest}: "


def _block(status: str, check: str, text: str) -> list[str]:
    head = f"{status:{STATUS_WIDTH}} {check:{CHECK_WIDTH}} "
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]  # fmt: skip
