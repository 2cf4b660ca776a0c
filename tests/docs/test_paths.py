"""Files that the documentation names are there."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, documents

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`([\w.@*-]+(?:/[\w.@*-]+)*\.(?:py|c|h|hpp|md|toml|sbatch|sh|in))`")
OF_THE_READER = {"app.py", "pi.py", "mylib.py", "my.toml", "columns.py", "cp.py"}


@cache
def files() -> tuple[str, ...]:
    """Every file of the project, relative to the repository."""
    skipped = {"build", "out", "dist"}
    tops = [p for p in ROOT.iterdir() if not p.name.startswith(".") and p.name not in skipped]
    found = [p for top in tops for p in (top.rglob("*") if top.is_dir() else [top])]
    return tuple(str(p.relative_to(ROOT)) for p in found if p.is_file())


def exists(name: str, page: Path) -> bool:
    """Whether a file has this path, or one that ends so: a module that a README names, below it."""
    folder = page.parent.relative_to(ROOT)
    anywhere = folder in (Path("docs"), Path()) or not name.endswith(".py")
    below = "" if anywhere else f"{folder}/"
    return (page.parent / name).exists() or any(
        fnmatch(path, name) or (path.startswith(below) and fnmatch(path, f"*/{name}"))
        for path in files()
    )


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_that_exist(page: Path) -> None:
    named = set(NAMED.findall(FENCE.sub("", page.read_text()))) - OF_THE_READER
    assert not [name for name in sorted(named) if not exists(name, page)]


def index_lines() -> list[str]:
    text = (ROOT / "docs" / "where-to-change.md").read_text()
    return [line for line in text.splitlines() if line.startswith("| ") and "`" in line]


def test_the_index_of_changes_names_enough() -> None:
    assert len({name for line in index_lines() for name in NAMED.findall(line)}) >= 60


def test_the_index_of_changes_names_constants_of_its_files() -> None:
    for line in index_lines():
        sources = "".join(
            (ROOT / name).read_text() for name in NAMED.findall(line) if (ROOT / name).is_file()
        )
        for constant in re.findall(r"`([A-Z][A-Z_]+)`", line):
            assert re.search(rf"^{constant}\b.* = ", sources, re.MULTILINE), line


def test_the_index_of_changes_names_folders_that_exist() -> None:
    for line in index_lines():
        for folder in re.findall(r"`((?:[\w.-]+/)+)`", line):
            assert (ROOT / folder).is_dir(), line


def test_the_index_of_changes_names_functions_and_classes_of_its_files() -> None:
    """Of rows with "`Class.method` in `path`"."""
    for line in index_lines():
        for names, path in re.findall(r"((?:`[\w.]+`(?:, )?)+) in `([\w/.-]+\.\w+)`", line):
            source = (ROOT / path).read_text()
            for name in re.findall(r"(\w+)`", names):
                assert re.search(rf"(def|class|object|^) *{name}\b", source, re.MULTILINE), line
