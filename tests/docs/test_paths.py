"""Files, modules and functions that the documentation and docstrings name are there."""

from __future__ import annotations

import ast
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


PACKAGES = ("alchemist_ray", "mpi_workers", "ali", "envs")
# Of Python's source, and of the other languages; an identifier in backticks, also `A.f` and `f()`.
OTHERS = (".c", ".h", ".hpp", ".scala", ".java", ".f90", ".toml")
IDENTIFIER = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
OF_OTHERS = {"VecMonitor", "ziglang"}  # of Stable-Baselines3, and a package


def docstring(node: ast.AST) -> str:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    return (ast.get_docstring(node, clean=False) or "") if isinstance(node, kinds) else ""


def words_of(node: ast.AST, texts: set[str]) -> list[str]:
    """The names that a piece of code has, and the words of its texts but for docstrings."""
    match node:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return [name]
        case ast.Name(name) | ast.Attribute(attr=name) | ast.arg(name) | ast.keyword(str(name)):
            return [name]
        case ast.alias(name, other):
            return [*name.split("."), other or ""]
        case ast.Constant(str(text)) if text not in texts:
            return re.findall(r"\w+", text)
    return []


@cache
def sources() -> tuple[frozenset[str], list[tuple[str, str]]]:
    """All names in the packages' code, and each docstring with its file."""
    known, found = set[str](), list[tuple[str, str]]()
    for path in files():
        if not path.startswith((*PACKAGES, "tests", "benchmarks")):
            continue
        known.update(Path(path).parts, [Path(path).stem])
        if path.endswith(OTHERS):
            known.update(re.findall(r"\w+", (ROOT / path).read_text()))
        elif path.endswith(".py"):
            nodes = [*ast.walk(ast.parse((ROOT / path).read_text()))]
            own = {docstring(node) for node in nodes} - {""}
            known.update(*(words_of(node, own) for node in nodes))
            found += [(path, text) for text in own if path.startswith(PACKAGES)]
    return frozenset(known), found


def unknown(text: str) -> list[str]:
    names = IDENTIFIER.findall(FENCE.sub("", text))
    paths = re.compile(r"\.(md|py|c|h|toml|so|sh)$")
    last = {name: name.rpartition(".")[2] for name in names if not paths.search(name)}
    return sorted(name for name, word in last.items() if word not in {*sources()[0], *OF_OTHERS})


def test_docstrings_name_what_is_there() -> None:
    assert not [(path, bad) for path, text in sources()[1] if (bad := unknown(text))]


READMES = [page for page in documents() if page.name == "README.md"
           and page.relative_to(ROOT).parts[0] in PACKAGES]  # fmt: skip


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_of_a_readme_name_modules_that_are_there(page: Path) -> None:
    text, absent, listed = page.read_text(), [], False
    assert not unknown(text)
    for line in text.splitlines():
        listed = line.startswith("|") and (
            listed or bool(re.match(r"\| (module|folder|file)", line))
        )
        for name in re.findall(r"`(\w[\w./-]*)`", line.split("|")[1]) if listed else ():
            below = (f"{name.rstrip('/')}.*", f"{name}", f"**/{name}.py", f"**/{name}.scala")
            absent += [] if any(any(page.parent.glob(each)) for each in below) else [name]
    assert not absent
