"""The library behind expressions on handles: all of linalg, and array operations.

A gang loads it as ``ali.arrays``, in addition to any linalg that a user loads.
"""

from ali.arrays.axes import join, matmul_each, permute, reshape
from ali.arrays.expressions import evaluate, reduce_elements
from ali.arrays.fourier import fourier
from ali.arrays.lookup import (
    bincount,
    histogram,
    interp,
    isin,
    nan_to_num,
    round,
    searchsorted,
    segment_sum,
    take_along_axis,
)
from ali.arrays.operands import array, choose, combine, filled, plan, progression, reduce
from ali.arrays.ordering import argsort, cumulative, quantile, sort, unique, unique_all
from ali.arrays.random_numbers import draw
from ali.arrays.rearranging import broadcast, outer, repeat, roll, tile
from ali.arrays.selecting import (
    assign,
    assign_elements,
    elements,
    nonzero,
    part,
    pick,
    put_elements,
    update,
)
from ali.linalg import *  # noqa: F403
from ali.linalg import PURE as PURE

__all__ = [
    "argsort", "array", "assign", "assign_elements", "bincount", "broadcast", "choose",
    "combine", "cumulative", "draw", "elements", "evaluate", "filled", "fourier",
    "histogram", "interp", "isin", "join", "matmul_each", "nan_to_num", "nonzero", "outer", "part",
    "permute", "pick", "plan", "progression", "put_elements", "quantile", "reduce",
    "reduce_elements", "repeat", "reshape", "roll", "round", "searchsorted", "segment_sum", "sort",
    "take_along_axis", "tile", "unique", "unique_all", "update",
]  # fmt: skip
