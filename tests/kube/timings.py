"""How long each step took, in the order of the steps; a table of it for ``docs/kubernetes.md``."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md"
MARK = re.compile(r"(<!-- timings:.*?-->\n).*?(<!-- /timings -->)", re.S)


class Timings:
    """``with timings("what"): ...`` notes how long it took, if it did not fail."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._start = time.monotonic()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.note(what, f"{time.monotonic() - start:.0f} s")

    def note(self, what: str, told: str) -> None:
        self.lines.append((what, told))
        print(f"[{told:>7}] {what}", flush=True)

    def end(self) -> None:
        """Note how long all of it took."""
        self.note("in all", f"{time.monotonic() - self._start:.0f} s")

    def table(self) -> str:
        rows = "".join(f"| {what} | {told} |\n" for what, told in self.lines)
        return f"| step | time |\n|---|---|\n{rows}"

    def write(self, head: str) -> None:
        """Write the table to its marked place in the page."""
        text = PAGE.read_text()
        PAGE.write_text(MARK.sub(lambda m: f"{m[1]}{head}\n\n{self.table()}{m[2]}", text))
