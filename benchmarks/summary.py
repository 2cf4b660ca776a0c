"""The summary in docs/results.md: how many targets each benchmark meets, and those it misses.

``python -m benchmarks.summary`` writes it from the JSON files in results/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, markdown, write_part

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
# Of a page that misses targets: what limits them ("open": not known). The pages have measurements.
WHY = {
    "between_hosts": "machine: both hosts are on two cores, and ours need 0.5 s of CPU for 1 GB, "
    "plain streams 0.25",
    "clients": "Ray's and Spark's own copies; a cost in Python for each of 200 blocks is open",
    "cost_model": "machine: ranks that wait for a core, which the model does not count",
    "env_step": "machine: bare processes with the same messages take as long",
    "factorizations": "open; ScaLAPACK's takes 1.2 times as long as NumPy's",
    "files": "machine: one process reaches the disk's rate; warm, copying the file into the ranks' "
    "memory takes half",
    "gallery": "machine: a core that a wait's sleep left idle wakes late; PyLops-MPI: open",
    "gangs": "machine: both hosts are on two cores",
    "gateway": "machine: encryption at both ends takes both cores, and the rest counts in full",
    "heat": "a call of the gang and waking up take 1.5 of 8 ms; sort: open",
    "launch": "Python of five processes, one after the other; cold: Ray's start of a process",
    "peers": "the same BLAS: a session, checks and the call are the rest",
    "recovery": "machine: page faults of the new ranks' memory",
    "sparse": "machine: the ranks' halves alone need the target's time (memory bandwidth)",
    "spark": "Spark: it makes and reads rows by its own serialization",
    "transfer": "machine: the copy kernel alone, without ranks, reaches 0.73",
}
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
        met = f"{len(rows) - len(missed)} of {len(rows)}"
        lines.append((page, met, "; ".join(words), WHY[path.stem] if missed else ""))
    return markdown(("benchmark", "targets met", "missed", "what limits them"), lines)


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
