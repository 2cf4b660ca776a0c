"""Functions that test_linalg.py runs on ranks: routines against NumPy on the whole matrix."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from mpi4py import MPI

from ali import linalg
from ali.linalg import products as multiplication
from mpi_workers.matrix.layout import LAYOUTS
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_linalg_checks import FLOATS, NUMBERS, Array, Checks, small_panels, values


def products(check: Checks) -> None:
    pairs = [("VC_STAR", "VC_STAR"), ("MC_MR", "STAR_VC"), ("STAR_STAR", "VC_STAR")]
    pairs += [("VC_STAR", "STAR_STAR"), ("CIRC_CIRC", "MD_STAR"), ("STAR_STAR", "STAR_STAR")]
    shapes = [(17, 23, 13), (1, 40, 5), (40, 3, 40), (5, 64, 4), (2, 3, 2)]
    typed = list(zip(NUMBERS, pairs, strict=True))
    for (m, k, n), (dtype, (left, right)), way in check.some(
        shapes, typed, ("", "rows", "cols", "inner", "grid")
    ):
        a, b = values((m, k), dtype), values((k, n), dtype, 1)
        A, B = check.distribute(a, left), check.distribute(b, right)
        what = [(m, k, n), way, left, right]
        with small_panels():
            check.close(multiplication.product(check.ctx, A, B, way), a @ b, dtype, what)
    for one, other in check.some(NUMBERS, NUMBERS):
        a, b = values((7, 5), one), values((5, 9), other, 1)
        C = check.linalg.matmul(a, check.distribute(b, "MC_MR"))
        # NumPy's product of float32 is computed in float32 with either operand order.
        check.close(C, a @ b, np.result_type(a, b), [one, other], 100)
    a = values((9, 9), "float64")
    A = check.distribute(a)
    check.close(check.linalg.matmul(A, A), a @ a, "float64", "A A")
    check.close(A, a, "float64", "A is as it was", 1e-300)
    for layout, left, right in (
        ("VC_STAR", (30, 30), (30, 4)),
        ("VC_STAR", (4, 900), (900, 4)),
        ("STAR_VC", (4, 30), (30, 30)),
    ):
        A = check.distribute(values(left, "float64"), layout)
        B = check.distribute(values(right, "float64"), layout)
        C = check.linalg.matmul(A, B)
        check.true(C.layout == layout or check.ctx.size == 1, [left, right, C.layout])
    for shape, layout, dtype in itertools.product(
        [(40, 5), (3, 7)], ("VC_STAR", "VR_STAR"), ("float32", "float64")
    ):
        G = check.whole(check.linalg.gram(check.distribute(values(shape, dtype), layout)))
        check.true(np.array_equal(G, G.T), ["symmetric", shape, layout, dtype])


def _svd(check: Checks, a: Array, rank: int, layout: str, what: Any) -> None:
    """Check a truncated SVD of `a` against NumPy's."""
    used = np.dtype("float64") if a.dtype.kind == "i" else a.dtype
    real = used.type(0).real.dtype
    S, U, V = check.linalg.truncated_svd(check.distribute(a, layout), rank)
    check.true((S.layout, U.layout, V.layout) == ("STAR_STAR", "VC_STAR", "VC_STAR"), what)
    s, u, v = (check.whole(x) for x in (S, U, V))
    wide = a.astype("complex128" if used.kind == "c" else "float64")
    exact = np.linalg.svd(wide, compute_uv=False)[:rank]
    top = 10 * float(exact[0]) or 1e-300
    check.close(s, exact.astype(real), real, [what, "S"], top)
    check.true((np.diff(s) <= 0).all() and (s >= 0).all(), [what, "descending"])
    check.orthonormal(u, [what, "U"])
    check.orthonormal(v, [what, "V"])
    size = top * float(np.finfo(used).eps / np.finfo(wide.dtype).eps)
    product = (u * s).astype(wide.dtype)
    check.close(wide @ v, product, wide.dtype, [what, "A V = U S"], size)


def svds(check: Checks) -> None:
    cases = ((1, "VC_STAR"), (5, "STAR_VC"), (29, "MC_MR"), (30, "VC_STAR"))
    shapes = [(60, 30), (30, 60), (40, 40)]
    for dtype, shape, (rank, layout) in check.some((*FLOATS, "int64"), shapes, cases):
        _svd(check, values(shape, dtype), rank, layout, [dtype, shape, rank, layout])
    for shape in [(1, 1), (1, 7), (7, 1), (3, 2), (2, 3)]:
        for dtype in FLOATS:
            _svd(check, values(shape, dtype), min(shape), "VC_STAR", [dtype, shape, "tiny"])
    for dtype in FLOATS if check.ctx.size < 4 else ("float64", "complex64"):
        low = values((60, 2), dtype) @ values((2, 40), dtype, 1)
        for rank in (2, 5, 40):
            _svd(check, low, rank, "VC_STAR", [dtype, "of rank 2", rank])
            _svd(check, low.T.copy(), rank, "VC_STAR", [dtype, "of rank 2, wide", rank])
        for rank in (3, 30):
            _svd(check, np.zeros((50, 30), dtype), rank, "VC_STAR", [dtype, "zero", rank])
        a = np.zeros((50, 30), dtype)
        a[4, 7] = 2
        _svd(check, a, 4, "VC_STAR", [dtype, "one element"])
        _svd(check, np.eye(50, 30, dtype=dtype), 4, "VC_STAR", [dtype, "all values equal"])
    for size in (1e200, 1e-200):
        _svd(check, size * values((60, 30), "float64"), 4, "VC_STAR", ["size", size])
        _svd(check, size * values((30, 60), "complex128"), 4, "VC_STAR", ["size", size])
    a = values((200, 50), "float64") * 0.5 ** np.arange(50)
    _svd(check, a, 12, "VC_STAR", "decaying")
    with small_panels():
        _svd(check, a, 12, "VC_STAR", "decaying, in panels")
    s, u, v = map(check.whole, check.linalg.truncated_svd(a, 50))
    check.close((u * s) @ v.conj().T, a, "float64", "all of it: A = U S V^H", 30)


def norms(check: Checks) -> None:

    def norm(a: Array, layout: str) -> float:
        return float(check.linalg.norm(check.distribute(a, layout)))

    for layout, dtype in itertools.product(LAYOUTS, NUMBERS):
        a = values((13, 7), dtype)
        expected = np.linalg.norm(a.astype("complex128"))
        check.close(norm(a, layout), expected, "float64", [layout, dtype])
    for size in (1e300, 1e-300, 1e160, 1e-160):
        a = values((13, 7), "float64")
        check.close(norm(a * size, "MC_MR"), np.linalg.norm(a) * size, "float64", size)
    uneven = np.zeros((6, 6))
    uneven[:, 0] = 10.0 ** -np.arange(0, 300, 50)
    check.close(norm(uneven, "VC_STAR"), 1.0, "float64", "uneven")
    big = np.full((5, 5), 3e38, "float32")
    check.close(norm(big, "VC_STAR"), 5 * float(big[0, 0]), "float64", "float32")
    least = np.full((2, 2), np.iinfo(np.int64).min)
    check.close(norm(least, "VC_STAR"), 2.0**64, "float64", "int64")
    check.true(norm(np.zeros((3, 3)), "VC_STAR") == 0, "zero")
    with small_panels():
        a = values((90, 40), "complex128")
        check.close(norm(a, "VC_STAR"), np.linalg.norm(a), "float64", "in pieces")
    for first, second, what in ((np.inf, 1, "inf"), (np.nan, np.inf, "nan"), (1, -np.inf, "inf")):
        a = np.ones((7, 3))
        a[0, 0], a[6, 2] = first, second
        check.true(str(norm(a, "VC_STAR")) == what, ["nonfinite", what])


def transposes(check: Checks) -> None:
    for layout, dtype in itertools.product(LAYOUTS, NUMBERS):
        a = values((13, 6), dtype)
        B = check.linalg.transpose(check.distribute(a, layout))
        rows, cols = layout.split("_")
        check.true(B.layout == f"{cols}_{rows}" and B.shape == (6, 13), ["layout", layout])
        # On each rank alone: nothing may have been communicated.
        check.close(B.local, a.T[np.ix_(B.rows, B.cols)], dtype, [layout, dtype], 1e-300)


def random_numbers(check: Checks) -> dict[str, dict[str, Any]]:
    found, drawn = {}, []
    for name, center in (("normal", 0.0), ("uniform", 0.5)):

        def draw(m: int, n: int, seed: int, name: str = name) -> Array:
            return check.whole(getattr(check.linalg, f"random_{name}")(m, n, seed))

        large = draw(300, 200, 3)
        drawn.append(large.reshape(-1))
        found[name] = {
            "values": draw(7, 5, 3).tolist(),
            "another seed": draw(7, 5, -4).tolist(),
            "of more rows": draw(9, 5, 3)[:7].tolist(),
            "range": [float(large.min()), float(large.max())],
            "moments": [float(((large - center) ** k).mean()) for k in (1, 2, 3, 4)],
            "different": len(np.unique(large)),
            "across": float(np.abs(np.corrcoef(large) - np.eye(300)).max()),
        }
    found["both"] = {"correlation": float(abs(np.corrcoef(*drawn)[0, 1]))}
    return found


def refused(check: Checks) -> list[Any]:
    """Failures of bad calls, before any message and during the computation."""
    ctx = check.ctx
    A = ctx.zeros((4, 3), "float64")
    says = check.refusals(linalg, alone=True)
    says("matmul", "ShapeError: A is 4 x 3 and B is 4 x 3; A must have", A, A)
    says("truncated_svd", "BadArgumentError: rank=0; it must be 1 to 3 for a 4 x 3 matrix", A, 0)
    says("truncated_svd", "BadArgumentError: rank=4; it must be 1 to 3 for a 4 x 3 matrix", A, 4)
    says("truncated_svd", "BadArgumentError: tol=-1.0; it must be", A, 1, -1.0)
    says("truncated_svd", "BadArgumentError: tol=nan; it must be", A, 1, float("nan"))
    says("truncated_svd", "BadArgumentError: max_iterations=-1; it must be", A, 1, 0.0, -1)
    says("random_normal", "ShapeError: -1 x 3 is not a shape", -1, 3, 1)
    says("random_normal", "ShapeError: 3 x -1 is not a shape", 3, -1, 1)
    late = check.refusals(linalg)
    for bad, shape in itertools.product((np.nan, np.inf), ((60, 30), (30, 60), (5, 4))):
        a = values(shape, "float64")
        a[shape[0] - 1, 2] = bad
        late("truncated_svd", "LinAlgError: A contains NaN or infinity", check.distribute(a), 3)
    huge = check.distribute(np.full((60, 30), 3e38, "float32"))
    late("truncated_svd", "LinAlgError: A contains NaN or infinity, or is too large", huge, 3)
    flat = check.distribute(values((400, 300), "float64"))
    late("truncated_svd", "LinAlgError: ARPACK found", flat, 10, 0.0, 1)
    late("truncated_svd", "nothing", flat, 10, 1e-2)
    return says.found + late.found


def nonfinite_passes(check: Checks) -> None:
    """NaN and inf propagate as in NumPy, and no rank hangs."""
    a, b = values((9, 6), "float64"), values((6, 5), "float64", 1)
    a[2, 1], a[5, 3] = np.nan, np.inf
    C = check.whole(check.linalg.matmul(a, b))
    check.true(np.array_equal(np.isfinite(C), np.isfinite(a @ b)), "matmul")
    G = check.whole(check.linalg.gram(a))
    check.true(np.array_equal(np.isfinite(G), np.isfinite(a.T @ a)), "gram")
    _, R = check.linalg.qr(a)
    check.true(not np.isfinite(check.whole(R)).all(), "qr")
    B = check.whole(check.linalg.transpose(a))
    check.true(np.array_equal(B, a.T, equal_nan=True), "transpose")


def reproducible(plain: Checks) -> list[Any]:
    """The same call gives the same bits, and reported progress is plausible."""
    told: list[Any] = []
    storage = Storage(plain.gang.rank, Pool(1 << 24, shared=False))
    report = lambda fraction, text: told.append([fraction, text])  # noqa: E731
    check = Checks(GangView(MPI.COMM_WORLD, storage, report, plain.gang.folder))
    A = check.distribute(values((4000, 200), "float64"))
    one, other = (
        [check.whole(x).tobytes() for x in check.linalg.truncated_svd(A, 8)] for _ in range(2)
    )
    return [one == other, told]


def everything(gang: GangView) -> dict[str, Any]:
    return Checks.results_of(
        gang, products, svds, norms, transposes, nonfinite_passes, random_numbers, refused,
        reproducible,
    )  # fmt: skip
