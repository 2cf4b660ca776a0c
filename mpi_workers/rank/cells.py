"""Cells of a notebook on the ranks: code that shares its variables with the cells before it."""

from __future__ import annotations

import ast
import linecache
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MODULE = "__mpi_cells__"  # its variables live as long as the rank


def run_cell(
    comm: Any, text: str, number: int, given: Mapping[str, Any], wanted: Sequence[str]
) -> dict[str, Any]:
    """Run a cell on this rank, and print the value of its last expression, if no `;` follows.

    Parameters
    ----------
    comm : Intracomm
        Is the variable ``comm`` of the cell; ``rank``, ``size`` and ``np`` are there too.
    text : str
        The code.
    number : int
        Of the cell, for tracebacks.
    given : mapping
        Further variables.
    wanted : sequence of str
        Variables to return.

    Raises
    ------
    NameError
        If a wanted variable is not there after the cell. Also what the code raises.
    """
    module = sys.modules.setdefault(MODULE, types.ModuleType(MODULE))
    space = module.__dict__
    space.update({"np": np, "comm": comm, "rank": comm.rank, "size": comm.size, **given})
    name = f"<%%mpi cell {number}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    tree = ast.parse(text, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), space)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), space)
        if value is not None and not text.rstrip().endswith(";"):
            sys.stdout.write(f"{value!r}\n")
    absent = [variable for variable in wanted if variable not in space]
    if absent:
        raise NameError(f"the cell has no variable {', '.join(absent)} (--get)")
    return {variable: space[variable] for variable in wanted}
