"""One number has one name: those that several files use are declared once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("alchemist_ray", "ali", "envs", "mpi_workers")


def declared(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and text of the constants of a module that are numbers."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, ast.unparse(node.value)
            if name.isupper() and re.fullmatch(r"\d[\d. <*+-]*", value):
                yield name, value


def imported(tree: ast.Module) -> Iterator[str]:
    """Names that a module takes from others."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name for alias in node.names}
            yield from (alias.name for alias in node.names if alias.name.isupper())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            yield node.attr


def test_a_number_that_several_files_use_has_no_namesake() -> None:
    """`END_TIMEOUT_S` was 15, 10, 5 and 4 s, `BLOCK` was bytes, rows, columns and ports."""
    values, used = defaultdict[str, dict[str, str]](dict), set()
    for path in (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(), str(path))
        used |= set(imported(tree))
        for name, value in declared(tree):
            values[name][str(path.relative_to(ROOT))] = value
    assert {"GANG_END_S", "INLINE_NBYTES"} <= values.keys() & used
    several = {name: where for name, where in values.items() if len(set(where.values())) > 1}
    assert not {name: where for name, where in several.items() if name in used}
