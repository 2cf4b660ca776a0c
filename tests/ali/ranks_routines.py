"""Functions that test_routines.py runs on ranks: every routine of the table, on many matrices."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from ali import DistMatrix, registry
from ali.linalg import eigen, qr_factorization, triangular
from ali.scalapack import cyclic, spectra
from ali.scalapack.cyclic import Call
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import LAYOUTS
from mpi_workers.rank.gang_view import GangView
from tests.ali import routine_table
from tests.ali.ranks_linalg_checks import FLOATS, Array, Checks, small_panels
from tests.support.devices import counted
from tests.support.suite import scaled

# Of the table those whose errors are small for every matrix, or for matrices without a kind.
STABLE = {
    "eigh", "gram", "lq", "lu", "matmul", "norm", "polar", "qr", "qr_pivoted", "singular_values",
    "svd", "svdvals", "transpose",
}  # fmt: skip
REGULAR = {
    "cholesky", "cond", "condest", "conjugate_gradient", "det", "inv", "lstsq", "ridge", "slogdet",
    "solve", "solve_triangular",
}  # fmt: skip
KEEPS_DTYPE = {"matmul", "transpose"}  # of integers and bool, in linalg
SHAPES = [(67, 23), (23, 67), (40, 40), (1, 1), (1, 5), (5, 1), (3, 2), (25, 17)]
ORDERS = (45, 1, 2, 7, 16)
KINDS = ("zero", "low", "ill", "eye")
NARROW = ("int32", "int64", "bool")
LIMIT = 60.0  # roundings
LOOSE = {"elemental": 3000.0}  # of ill-conditioned matrices: MRRR, and eigenvalues close to zero
LAID = (*LAYOUTS, "BLOCK", "BLOCK_CYCLIC:3")


@contextmanager
def spread() -> Iterator[None]:
    """Matrices of a few columns are spread, in panels of fewer."""
    with small_panels(), pytest.MonkeyPatch.context() as patch:
        for module in (eigen, qr_factorization):
            patch.setattr(module, "ON_ONE_RANK", 3)
        for module in (qr_factorization, triangular):
            patch.setattr(module, "PANEL_COLUMNS", 5)
        patch.setattr(eigen, "WIDTH", 4)
        patch.setattr(eigen, "LEAF", 6)
        patch.setattr(eigen, "MERGE_WIDTH", 7)
        yield


@contextmanager
def blocks(copied: bool) -> Iterator[None]:
    """ScaLAPACK on blocks of one element as they lie, or on copies in blocks so small that there
    are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cyclic, "BLOCK_SIZE", 8)
        patch.setattr(cyclic, "MOVED", 1 << 10)
        patch.setattr(spectra, "LEAF", 5)
        patch.setattr(spectra, "WIDTH", 7)
        for kind in cyclic.BLOCKED_FROM:
            if kind != "lange":
                patch.setitem(cyclic.BLOCKED_FROM, kind, 1 if copied else 1 << 30)
        yield


@contextmanager
def in_place() -> Iterator[None]:
    """No elements move between blocks."""

    def refuse(*_: Any) -> None:
        raise AssertionError("elements were moved to other blocks")

    with blocks(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "_move", refuse)
        yield


@contextmanager
def on_device() -> Iterator[None]:
    """All products on a device, for which PyTorch's CPU stands in; in panels of a few elements."""
    if importlib.util.find_spec("torch") is None:
        raise Failure("LibraryNotFoundError", "needs torch")
    with small_panels(), counted(products=True) as found:
        yield
        assert found.copies


# For each way: the library, its environment, the layouts of arguments, the layout of large results
# ("": any), additional arguments.
Way = tuple[str, Callable[[], Any], tuple[str, ...], str, dict[str, Any]]
WAYS: dict[str, Way] = {
    "linalg": ("linalg", nullcontext, LAID, "", {}),
    "panels": ("linalg", small_panels, LAID, "", {}),
    "spread": ("linalg", spread, LAID, "", {}),
    "on a device": ("linalg", on_device, LAID, "", {}),
    "scalapack": ("scalapack", lambda: blocks(False), LAYOUTS, "MC_MR", {}),
    "scalapack in blocks": ("scalapack", lambda: blocks(True), LAYOUTS, "MC_MR", {}),
    "scalapack in place": (
        "scalapack", in_place, ("BLOCK_CYCLIC:2", "BLOCK_CYCLIC:8"), "as given", {},
    ),
    "elemental": ("elemental", nullcontext, LAID, "MC_MR", {}),
    "linalg by scalapack": ("linalg", nullcontext, LAID, "VC_STAR", {"method": "scalapack"}),
    "linalg by elemental": ("linalg", nullcontext, LAID, "VC_STAR", {"method": "elemental"}),
}  # fmt: skip
METHODS = ("eigh", "lstsq", "qr", "solve", "svd")  # of linalg with `method` of another library


def cases(way: str, gang: GangView) -> Iterator[tuple[str, int, str, str, tuple[int, int], int]]:
    """Routine, number of its case, dtype, kind of matrix, shape, order; a part of all of them."""
    library, *_, more = WAYS[way]
    table = routine_table.LIBRARIES[library]
    names = [n for n in table if n in STABLE | REGULAR and (not more or n in METHODS)]
    if way == "scalapack in place":
        names.remove("lstsq")  # which needs room for the longer of both sides
    found: list[Any] = []
    for name in names:
        for number in range(len(table[name])):
            kinds = ("", *KINDS) if name in STABLE else ("",)
            sizes = zip(SHAPES, itertools.cycle(ORDERS))
            found += itertools.product([name], [number], FLOATS, kinds, sizes)
            narrow = NARROW if name in STABLE else NARROW[:2]  # of bool few are positive definite
            found += itertools.product([name], [number], narrow, [""], [((9, 8), 9)])
    steps = scaled({1: 13, 2: 19}, {1: 7, 2: 11})  # longer than each list of choices
    step = steps.get(gang.size, scaled(61, 17))
    for name, number, dtype, kind, (shape, order) in found[gang.size % step :: step]:
        yield name, number, dtype, kind, shape, order


def agree(gang: GangView, way: str, path: str | None = None) -> dict[str, Any]:
    """How many calls there were by routine, and those whose errors are too large."""
    library, environment, layouts, kept, _ = WAYS[way]
    check = Checks(gang)
    module = importlib.import_module(registry.SHIPPED[library])
    try:
        if hasattr(module, "load"):
            module.load(check.ctx.state, path)
        done: dict[str, int] = {}
        at = itertools.cycle(layouts)
        with environment():
            for case in cases(way, gang):
                _one(check, module, WAYS[way], case, next(at))
                done[case[0]] = done.get(case[0], 0) + 1
    except Failure as failure:
        if failure.kind == "LibraryNotFoundError":
            return {"missing": failure.message}
        raise
    if hasattr(module, "close"):
        module.close(check.ctx.state)
    return {"done": done, "checks": check.result(), "kept": kept}


def _one(check: Checks, module: Any, way: Way, case: tuple[Any, ...], layout: str) -> None:
    name, number, dtype, kind, (m, n), order = case
    library, _, _, kept, more = way
    given, error = routine_table.LIBRARIES[library][name][number]
    plain = routine_table.data(library, m, n, order, 1, dtype, kind)
    used = {key: plain[x] for key, x in given.items() if key in routine_table.MATRICES}
    matrices = {key: check.distribute(a, layout) for key, a in used.items()}
    what = [name, number, dtype, kind, (m, n), order, layout]
    if name in ("norm", "cond") and kind == "zero":
        return
    try:
        results = getattr(module, name)(check.ctx, **(given | more | matrices))
    except Failure as failure:
        if failure.kind == "LibraryNotFoundError":
            raise
        return check.true(False, [*what, failure.message])
    results = results if isinstance(results, tuple) else (results,)
    for key, matrix in matrices.items():
        check.true(np.array_equal(check.whole(matrix), used[key]), [*what, key, "was changed"])
    precise = _used_dtype(used)
    for x in results:
        if isinstance(x, DistMatrix):
            large = layout if kept == "as given" else kept
            check.true(not large or x.layout in (large, "STAR_STAR"), [*what, x.layout])
            right = x.dtype.kind == "i" or x.dtype in (precise, precise.type(0).real.dtype)
            check.true(right or name in KEEPS_DTYPE, [*what, str(x.dtype)])
    whole = [check.whole(x) if isinstance(x, DistMatrix) else x for x in results]
    taken = list(used.values())
    if library != "linalg" or name not in KEEPS_DTYPE:
        taken = [a.astype(precise) if a.dtype.kind in "bi" else a for a in taken]
    wide = [_wide(x) if isinstance(x, np.ndarray) else x for x in (*taken, *whole)]
    limit = LIMIT * (LOOSE.get(library, 10.0) / 10 if kind == "ill" else 1.0)
    found = float(error(*wide))
    single = precise.itemsize == 4 * (1 + (precise.kind == "c"))
    allowed = {"condest": 3.0, "conjugate_gradient": 1e-4 if single else 1e-7}
    eps = float(np.finfo(precise).eps)
    check.true(found <= allowed.get(name, limit * eps), [*what, found / eps])


def _used_dtype(used: dict[str, Array]) -> np.dtype[Any]:
    kinds = [np.dtype(np.float64) if a.dtype.kind in "bi" else a.dtype for a in used.values()]
    return np.result_type(*kinds)


def _wide(x: Array) -> Array:
    return x.astype({"c": np.complex128, "f": np.float64}.get(x.dtype.kind, x.dtype))


def everything(gang: GangView) -> dict[str, Any]:
    """All ways in one launch: starting ranks takes longer than most checks."""
    return {way: agree(gang, way) for way in WAYS}
