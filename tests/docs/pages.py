"""Finds the code blocks of the documentation and groups them into programs.

- A block whose first line is a file name in a comment (``# pi.py``, ``// wrapped.c``) is that file.
- A block that begins with an import is a program of its own; one that does not continues the
  program above it.
- A block whose first line is ``# Notebook 1`` is a cell of one of two notebooks: it is run by
  ``test_two_notebooks.py``.
- A block whose first line is ``# Not run by the tests: REASON`` is shown only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GALLERY = "docs/gallery"  # its pages run in an environment of their own: test_gallery.py
BLOCK = re.compile(r"^```(python|c|cpp|fortran)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?:#|//|!) (\w+\.(?:py|c|cpp|f90))\n")
NOT_RUN = re.compile(r"# Not run by the tests: \w")
NOTEBOOK = re.compile(r"# Notebook (\d)")
BUILD = re.compile(r"(?:^.*\\\n)?^.* -o (\w+(?:\.so)?) .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of Python that is run."""

    page: str  # relative to the repository
    line: int  # of its first line of code, counted from 1
    source: str
    fresh: bool  # it begins a program

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Page:
    """The programs of a page, and what they need beside themselves."""

    name: str
    blocks: tuple[Block, ...]
    files: dict[str, str]
    commands: dict[str, str]  # a shared object or program: the page's command that builds it


def documents() -> list[Path]:
    """Every page of docs/ and every README of the project; the history names files of its time."""
    history = ROOT / "docs/history.md"
    found = [*(page for page in ROOT.glob("docs/**/*.md") if page != history), ROOT / "README.md"]
    for package in ("alchemist_ray", "mpi_workers", "ali", "envs", "cray", "kuberay", "benchmarks"):
        found += (ROOT / package).rglob("README.md")
    return sorted(found)


def read_page(path: Path) -> Page:
    name, text = str(path.relative_to(ROOT)), path.read_text()
    blocks: list[Block] = []
    files: dict[str, str] = {}
    for match in BLOCK.finditer(text):
        language, source = match.groups()
        file = FILE.match(source)
        if file:
            files[file.group(1)] = source
        elif language == "python" and not (NOT_RUN.match(source) or NOTEBOOK.match(source)):
            line = text.count("\n", 0, match.start()) + 2
            first = re.sub(r"\A(\s*#.*\n)+", "", source)
            fresh = re.match(r"(import|from) |\"\"\"", first) is not None or not blocks
            blocks.append(Block(name, line, source, fresh))
    commands = {match[1]: match[0] for match in BUILD.finditer(text)}
    return Page(name, tuple(blocks), files, commands)


def pages() -> list[Page]:
    """The pages that have something to run; a program that two pages show is run once."""
    found, seen = [], set[str]()
    for path in documents():
        if path.is_relative_to(ROOT / GALLERY):
            continue
        page = read_page(path)
        blocks = tuple(b for b in page.blocks if not b.fresh or b.source not in seen)
        seen.update(b.source for b in blocks)
        if blocks:
            found.append(Page(page.name, blocks, page.files, page.commands))
    return found
