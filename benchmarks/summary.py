"""The summary in docs/results.md: how many targets each benchmark meets, and those it misses.

``python -m benchmarks.summary`` writes it from the JSON files in results/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, markdown, write_part

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
SHOWN = 3  # missed targets of a benchmark, the furthest ones first


def main() -> None:
    write_part(PAGE, "summary", table())


def table() -> str:
    """A line for each benchmark that has results."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        told = json.loads(path.read_text())
        rows = told["rows"]
        missed = sorted((row for row in rows if _share(row) < 1), key=_share)
        words = [*map(_words, missed[:SHOWN])]
        words += [f"{len(missed) - SHOWN} more"] * (len(missed) > SHOWN)
        page = f"[{told['name']}](../benchmarks/results/{path.stem}.md)"
        lines.append((page, f"{len(rows) - len(missed)} of {len(rows)}", "; ".join(words)))
    return markdown(("benchmark", "targets met", "missed"), lines)


def _share(row: dict[str, Any]) -> float:
    """What was reached of the target; 1 and more: met."""
    measured, target = row["measured"], row["target"]
    over, under = (target, measured) if row["at_most"] else (measured, target)
    return float(over / under) if under > 0 else 1.0  # a difference may be below 0


def _words(row: dict[str, Any]) -> str:
    sign = "≤" if row["at_most"] else "≥"
    return f"{row['what']}: {row['measured']:.3g} {row['unit']} ({sign} {row['target']:g})"


if __name__ == "__main__":
    main()
