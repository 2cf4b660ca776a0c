"""The summary in docs/results.md: how many targets each benchmark meets, and those it misses.

``python -m benchmarks.summary`` writes it from the JSON files in results/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
BEGIN, END = "<!-- summary -->\n", "<!-- /summary -->"


def main() -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")


def table() -> str:
    """A line for each benchmark that has results."""
    lines = ["| benchmark | targets met | missed |", "|---|---|---|"]
    for path in sorted(RESULTS.glob("*.json")):
        told = json.loads(path.read_text())
        rows = told["rows"]
        missed = [row for row in rows if not _met(row)]
        lines.append(
            f"| [{told['name']}](../benchmarks/results/{path.stem}.md) | {len(rows) - len(missed)} "
            f"of {len(rows)} | {'; '.join(map(_words, missed))} |"
        )
    return "\n".join(lines) + "\n"


def _met(row: dict[str, Any]) -> bool:
    measured, target = row["measured"], row["target"]
    return bool(measured <= target if row["at_most"] else measured >= target)


def _words(row: dict[str, Any]) -> str:
    sign = "≤" if row["at_most"] else "≥"
    return f"{row['what']}: {row['measured']:.3g} {row['unit']} ({sign} {row['target']:g})"


if __name__ == "__main__":
    main()
