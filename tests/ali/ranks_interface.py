"""Rank side of test_interface.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import ali
from ali import DistMatrix
from ali.interface import Context
from ali.registry import load
from mpi_workers.rank.gang_view import GangView
from tests.support.layouts import SOME_LAYOUTS


def _whole(ctx: Context, matrix: DistMatrix) -> Any:
    return ctx.to_layout(matrix, "STAR_STAR").local


def _refused(ctx: Context, call: Callable[[], Any]) -> int:
    """How many ranks refuse it with a ValueError."""
    try:
        call()
    except ValueError:
        return int(ctx.comm.allreduce(1))
    return int(ctx.comm.allreduce(0))


def matrices(gang: GangView) -> dict[str, Any]:
    ctx = Context(gang, {})
    zeros = ctx.zeros((5, 7), np.int32, "MC_MR")
    like = ctx.empty_like(zeros)
    own = np.array([[10.0 * ctx.rank + i] * 3 for i in range(ctx.rank, 5, ctx.size)])
    rows = ctx.new_from_rows(own.reshape(-1, 3), 5)
    few = [[float(i)] * 2 for i in range(ctx.rank, 2, ctx.size)]
    values = np.arange(12.0).reshape(4, 3)
    return {
        "zeros": bool((_whole(ctx, zeros) == np.zeros((5, 7))).all()),
        "empty_like": [like.layout, like.shape, like.dtype.name],
        "rows": _whole(ctx, rows).tolist(),
        "few rows": _whole(ctx, ctx.new_from_rows(np.array(few).reshape(-1, 2), 2)).tolist(),
        "replicated": all(
            bool((_whole(ctx, ctx.new_replicated(values, name)) == values).all())
            for name in SOME_LAYOUTS
        ),
        "vector": ctx.new_replicated(np.arange(4)).shape,
        "wrong rows": _refused(ctx, lambda: ctx.new_from_rows(np.zeros((9, 2)), 5)),
        "unknown layout": _refused(ctx, lambda: ctx.zeros((2, 2), float, "ROWS")),
        "unknown dtype": _refused(ctx, lambda: ctx.zeros((2, 2), "U3")),
    }


def documented(gang: GangView) -> list[bool]:
    """The example library of docs/own-library.md."""
    text = (Path(ali.__file__).parents[1] / "docs" / "own-library.md").read_text()
    source = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    with TemporaryDirectory() as folder:
        path = Path(folder, "columns.py")
        path.write_text(source)
        library = load("columns", str(path))
    ctx = Context(gang, {})
    values = np.arange(35.0).reshape(7, 5)
    (means,) = library.call(gang, "means", {"A": ctx.new_replicated(values, "MC_MR")})
    centred, norm = library.call(gang, "centre", {"A": ctx.new_replicated(values, "MC_MR")})
    expected = values - values.mean(axis=0)
    return [
        np.allclose(_whole(ctx, means), values.mean(axis=0)[None, :]),
        np.allclose(_whole(ctx, centred), expected)
        and bool(np.isclose(norm, np.linalg.norm(expected))),
    ]


def run_echo(gang: GangView) -> dict[str, Any]:
    library = load("echo")
    matrix = gang.new((3, 3), "float32", "VC_STAR")
    given = {"A": matrix, "i": 3, "texts": ["x"], "z": 2j}
    values = library.call(gang, "echo", given)
    defaults = [True, "echo", [1, 2], [0.5, 1.5], [True, False]]
    return {
        "who": library.call(gang, "who", {})[0],
        "same matrix": values[0] is matrix,
        "values": values[1:] == [3, 0.5, 2j, *defaults, ["x"]],
    }
