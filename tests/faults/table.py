"""The table of faults: victim x moment x kind of gang, with the outcome of each cell.

`CELLS` are faults of one step; ``test_table.py`` runs them. A fault that needs more steps has a
test of its own, with a mark: ``@pytest.mark.cell(victim, moment, kind, outcome)``. Several kinds
are separated by commas. ``python -m tests.faults.table`` prints both, and the cells without a test.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VICTIMS = (
    "rank", "all ranks", "data endpoint", "proxy", "mpiexec", "fork server", "agent",
    "GroupManager", "Driver", "program", "client", "gateway", "host", "network",
)  # fmt: skip
MOMENTS = (
    "starting", "idle", "in a call", "sending", "fetching", "resizing", "recovering", "stopping",
)  # fmt: skip
KINDS = ("private", "mpiexec", "named", "max_failures", "gateway", "elastic")


class Cell(NamedTuple):
    """A fault of one step.

    `outcome`: the gang is lost; or it is started again, and its matrices are rebuilt (goes on); or
    its ranks are, in the same memory (renewed).
    """

    victim: str
    moment: str
    kind: str
    outcome: str = "lost"
    how: str = "SIGKILL"  # or SIGTERM; in a call also: "others wait" for the rank in native MPI

    def __str__(self) -> str:
        more = "" if self.how == "SIGKILL" else f" ({self.how})"
        return f"{self.victim}, {self.moment}, {self.kind}{more}"


CELLS = (
    *(
        Cell(victim, moment, "private")
        for victim in ("data endpoint", "proxy", "GroupManager")
        for moment in ("idle", "in a call", "sending", "fetching")
    ),
    *(
        Cell("rank", moment, "private", "renewed")
        for moment in ("idle", "in a call", "sending", "fetching")
    ),
    Cell("rank", "in a call", "private", "renewed", "others wait"),
    Cell("all ranks", "idle", "private", "renewed"),
    Cell("all ranks", "in a call", "private", "renewed"),
    Cell("proxy", "in a call", "private", how="SIGTERM"),
    Cell("rank", "in a call", "mpiexec", "renewed"),
    Cell("mpiexec", "in a call", "mpiexec", "renewed"),
    Cell("rank", "in a call", "named", "renewed"),
    Cell("proxy", "idle", "named"),
    Cell("GroupManager", "idle", "named"),
    Cell("GroupManager", "in a call", "named"),
    *(
        Cell(victim, moment, "max_failures", "goes on")
        for victim in ("data endpoint", "proxy")
        for moment in ("idle", "in a call")
    ),
    Cell("proxy", "idle", "max_failures", "goes on", "SIGTERM"),
    Cell("GroupManager", "idle", "max_failures"),
)


def marked() -> Iterator[Cell]:
    """The cells of tests with a mark, in all folders of tests; without importing them."""
    for path in sorted(Path(__file__).parents[1].rglob("test_*.py")):
        text = path.read_text()
        if "mark.cell(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.cell":
                victim, moment, kinds, outcome = (ast.literal_eval(each) for each in node.args)
                yield from (Cell(victim, moment, kind, outcome) for kind in kinds.split(", "))


def unknown(cells: list[Cell]) -> list[Cell]:
    """Cells outside the table: a mark is misspelt."""
    return [
        each for each in cells
        if each.victim not in VICTIMS or each.moment not in MOMENTS or each.kind not in KINDS
    ]  # fmt: skip


def lines(cells: list[Cell]) -> Iterator[str]:
    """The table as Markdown; a cell without a test has a dash."""
    yield "| victim, moment | " + " | ".join(KINDS) + " |"
    yield "|---|" + "---|" * len(KINDS)
    empty = 0
    for victim in VICTIMS:
        for moment in MOMENTS:
            row = []
            for kind in KINDS:
                here = [each.outcome for each in cells if each[:3] == (victim, moment, kind)]
                row.append("; ".join(dict.fromkeys(here)) or "-")
                empty += not here
            yield f"| {victim}, {moment} | " + " | ".join(row) + " |"
    yield f"\n{len(cells)} tests; {empty} cells without one"


def main() -> int:
    cells = [*CELLS, *marked()]
    print("\n".join(lines(cells)))
    wrong = unknown(cells)
    print("".join(f"not in the table: {each}\n" for each in wrong), end="")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
