"""Kernels of HPCC and HPCG that all ranks compute together: a library that is loaded by its path.

HPL, PTRANS, MPIRandomAccess (GUPS), MPIFFT, and HPCG's conjugate gradients with a 27-point stencil.
Every routine validates its result as its benchmark does, as the library ``hpc``.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import scipy.fft
import scipy.sparse
from mpi4py import MPI
from numpy.typing import NDArray

from ali.blocks import block
from ali.hpc.identity import about
from ali.hpc.measures import (
    EPS,
    MAX_NBYTES,
    Measure,
    as_json,
    check_range,
    of_all_ranks,
    turn_times,
    validated,
)
from ali.interface import Context, routine
from ali.linalg.systems import solve
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.rank.gang_view import GangView

Vector = NDArray[np.float64]
DIAGONAL, NEIGHBOUR = 26.0, -1.0


class Stencil:
    """The matrix of a 27-point stencil on a cube of n^3 points on every rank.

    Row of a point: 26 on the diagonal, -1 for each of its up to 26 neighbours in the grid of all
    ranks. Vectors are arrays of this rank's n^3 points; `exchanged` adds a halo of one point.

    Attributes
    ----------
    matrix : scipy.sparse.csr_array, shape (n^3, (n + 2)^3)
        Rows of this rank's points; columns of the points with the halo.
    nonzeros : int
        Stored elements of all ranks.
    """

    def __init__(self, ctx: Context, n: int) -> None:
        self._ctx, self._n = ctx, n
        self._dims = MPI.Compute_dims(ctx.size, 3)
        self._at = np.argwhere(np.arange(ctx.size).reshape(self._dims) == ctx.rank)[0]
        steps = (-1, 0, 1)
        offsets = np.array([(a, b, c) for a in steps for b in steps for c in steps])
        points = np.indices((n, n, n)).reshape(3, -1).T
        near = points[:, None, :] + offsets  # (n^3, 27, 3), on this rank's cube
        everywhere = near + n * self._at
        there = ((everywhere >= 0) & (everywhere < n * np.array(self._dims))).all(axis=2)
        columns = np.ravel_multi_index(tuple(np.moveaxis(near + 1, 2, 0)), (n + 2,) * 3)
        values = np.where((offsets == 0).all(axis=1), DIAGONAL, NEIGHBOUR)
        starts = np.concatenate([[0], there.sum(axis=1).cumsum()])
        self.matrix = scipy.sparse.csr_array(
            (np.broadcast_to(values, there.shape)[there], columns[there].astype(np.int32), starts),
            shape=(n**3, (n + 2) ** 3),
        )
        self.nonzeros = int(ctx.comm.allreduce(self.matrix.nnz, MPI.SUM))
        self._halo = np.zeros((n + 2,) * 3)
        colours = points % 2 @ np.array([4, 2, 1])
        places = np.asarray(np.ravel_multi_index(tuple(points.T + 1), (n + 2,) * 3))
        self._colours = [
            (rows, places[rows], self.matrix[rows])
            for rows in (np.flatnonzero(colours == colour) for colour in range(8))
            if rows.size
        ]

    def exchanged(self, x: Vector) -> Vector:
        """x with the points of neighbouring ranks around it, zero outside of the grid. Collective.

        Six messages: the planes of each direction include the halo of the directions before.
        """
        halo, comm = self._halo, self._ctx.comm
        inner = (slice(1, -1),) * 3
        halo[inner] = x.reshape((self._n,) * 3)
        for axis in range(3):
            planes = np.moveaxis(halo, axis, 0)
            below, above = self._neighbour(axis, -1), self._neighbour(axis, 1)
            for sent, target, received, source in (
                (-2, above, 0, below),
                (1, below, -1, above),
            ):
                plane = np.zeros_like(planes[0], order="C")
                MPI.Comm.Sendrecv(
                    comm, np.ascontiguousarray(planes[sent]), target, 0, plane, source, 0
                )
                planes[received] = plane
        return halo.reshape(-1)

    def _neighbour(self, axis: int, step: int) -> int:
        at = self._at.copy()
        at[axis] += step
        if not 0 <= at[axis] < self._dims[axis]:
            return int(MPI.PROC_NULL)
        return int(np.ravel_multi_index(tuple(at), self._dims))

    def product(self, x: Vector) -> Vector:
        """A x. Collective."""
        found: Vector = self.matrix @ self.exchanged(x)
        return found

    def preconditioned(self, r: Vector) -> Vector:
        """One symmetric Gauss-Seidel sweep for A z = r from z = 0, without other ranks' points.

        Points are taken in eight colours: no two of a colour are neighbours, so that each colour is
        one product with a sparse matrix.
        """
        z = np.zeros((self._n + 2) ** 3)
        for rows, places, matrix in (*self._colours, *reversed(self._colours)):
            z[places] += (r[rows] - matrix @ z) / DIAGONAL
        return z.reshape((self._n + 2,) * 3)[1:-1, 1:-1, 1:-1].reshape(-1)

    def dot(self, x: Vector, y: Vector) -> float:
        """The inner product over all ranks. Collective."""
        total = np.array([x @ y])
        MPI.Comm.Allreduce(self._ctx.comm, MPI.IN_PLACE, total)
        return float(total[0])


MAX_SIDE = 200  # about 3 GB a rank
NORM = 52.0  # HPCG's bound of |A|: twice the diagonal
GAP_LIMIT = 1e-10


@routine("gflops", "residual", "departure")
def hpcg(
    ctx: Context, n: int = 32, iterations: int = 50, seconds: float = 1.0, fault: float = 0.0
) -> tuple[float, float, float]:
    """GFLOP/s of preconditioned conjugate gradients on a 27-point stencil, all ranks together.

    Parameters
    ----------
    n : int
        A rank has n^3 points; memory: about 400 n^3 bytes a rank (700 while the matrix is made).
    iterations : int
        Of one solution.
    seconds : float
        The best of all solutions within this time, at least one after a warm-up.
    fault : float
        Added to x[0] on rank 0 before the validation, to test the validation.

    Returns
    -------
    gflops : float
        For each iteration 6 flops a stored element (product 2, preconditioner 4) and 12 a point
        (three inner products, three updates), all ranks together.
    residual : float
        ``|b - A x| / |b|`` in the 2-norm after the last iteration.
    departure : float
        Departure of A and of the preconditioner M from symmetry, ``|x' A y - y' A x| / (2 |x| |A|
        |y| eps)`` for random x and y, the larger of both. At most 1.

    Raises
    ------
    Failure
        BadArgumentError if n or `iterations` is out of range; RoutineError if the departure
        exceeds its limit, or the residual of the iteration differs from b - A x by more than
        1e-10 |b|.

    Notes
    -----
    HPCG's matrix, right-hand side (the solution is 1 everywhere), halo exchange and symmetry test;
    its preconditioner on one level, without multigrid, by SciPy's sparse products: rates compare
    machines with each other here, not with HPCG's list. Source: Dongarra, Heroux, Luszczek,
    HPCG 3.1.
    """
    check_range("n", n, MAX_SIDE)
    check_range("iterations", iterations, 10_000)
    stencil = Stencil(ctx, n)
    b = stencil.product(np.ones(n**3))
    norm_b = math.sqrt(stencil.dot(b, b))
    found: list[tuple[Vector, Vector]] = []

    def work() -> None:
        found[:] = [conjugate_gradient(stencil, b, iterations)]

    times = turn_times(ctx, work, seconds, least=1, warm_up=1)
    x, r = found[0]
    if ctx.rank == 0:
        x[0] += fault
    true = b - stencil.product(x)
    gap = math.sqrt(stencil.dot(true - r, true - r)) / norm_b
    validated(ctx, "hpcg: residual of the iteration", gap, GAP_LIMIT)
    departure = validated(ctx, "hpcg: departure from symmetry", _departure(ctx, stencil), 1.0)
    flops = iterations * (6 * stencil.nonzeros + 12 * n**3 * ctx.size)
    residual = math.sqrt(stencil.dot(true, true)) / norm_b
    return 1e-9 * flops / float(times.min()), residual, departure


def conjugate_gradient(stencil: Stencil, b: Vector, iterations: int) -> tuple[Vector, Vector]:
    """x and the residual r after some iterations for A x = b from x = 0. Collective.

    Source: Golub, Van Loan, "Matrix Computations", 4th ed., 11.5.
    """
    x, r = np.zeros_like(b), b.copy()
    p, rz = np.zeros_like(b), 1.0
    norm_b = math.sqrt(stencil.dot(b, b))
    for _ in range(iterations):
        z = stencil.preconditioned(r)
        last, rz = rz, stencil.dot(r, z)
        p *= rz / last
        p += z
        product = stencil.product(p)
        alpha = rz / stencil.dot(p, product)
        x += alpha * p
        r -= alpha * product
        if math.sqrt(stencil.dot(r, r)) <= EPS * norm_b:  # a further step would divide by zero
            break
    return x, r


def _departure(ctx: Context, stencil: Stencil) -> float:
    rng = np.random.default_rng(ctx.rank)
    x, y = (rng.random(stencil.matrix.shape[0]) for _ in range(2))
    scale = 2 * NORM * EPS * math.sqrt(stencil.dot(x, x) * stencil.dot(y, y))
    return max(
        abs(stencil.dot(x, apply(y)) - stencil.dot(y, apply(x))) / scale
        for apply in (stencil.product, stencil.preconditioned)
    )


@routine("rate", "residual")
def ptrans(
    ctx: Context, n: int = 2000, seconds: float = 1.0, fault: float = 0.0
) -> tuple[float, float]:
    """GB/s of C = A^T + B for float64 matrices in blocks of rows, all ranks together.

    Parameters
    ----------
    n : int
        Rounded up to a multiple of the number of ranks. Memory: 40 n^2 bytes over all ranks.
    seconds : float
        The best of all turns within this time, at least three; a turn is as slow as its slowest
        rank.
    fault : float
        Added to an element of C on rank 0 before the validation, to test the validation.

    Returns
    -------
    rate : float
        8 n^2 bytes a turn, as in HPCC: all ranks together.
    residual : float
        ``|C - (A^T + B)| / (max(|A|, |B|) n eps)``, elements with the largest difference and value:
        every rank knows the elements of A by their row and column. At most 16.

    Raises
    ------
    Failure
        BadArgumentError if n is not positive or is too large; RoutineError if the residual
        exceeds its limit.

    Notes
    -----
    Each rank sends all of its part but ``1 / ranks`` in one MPI_Alltoall. Source: HPC Challenge
    1.5, PTRANS/pdtrans.c (with blocks of rows instead of a two-dimensional grid).
    """
    check_range("n", n, int((MAX_NBYTES * ctx.size / 8) ** 0.5))
    rows = -(-n // ctx.size)
    n = rows * ctx.size
    mine, every = np.arange(ctx.rank * rows, (ctx.rank + 1) * rows), np.arange(n)
    A, B = _elements(mine, every, 1), _elements(mine, every, 2)
    C = np.empty_like(B)
    times = turn_times(ctx, lambda: np.add(transposed(ctx, A), B, out=C), seconds)
    if ctx.rank == 0:
        C[0, 0] += fault
    gap = np.abs(C - (_elements(every, mine, 1).T + B)).max()
    norm = max(np.abs(A).max(), np.abs(B).max())
    residual = validated(ctx, "ptrans", float(gap / (norm * n * EPS)))
    return 8e-9 * n**2 / float(times.min()), residual


def transposed(ctx: Context, mine: NDArray[Any]) -> NDArray[Any]:
    """This rank's rows of the transpose. Collective.

    Parameters
    ----------
    mine : ndarray, shape (m / ranks, n), C-ordered
        This rank's rows, in blocks; m and n are multiples of the number of ranks.

    Returns
    -------
    ndarray, shape (n / ranks, m), C-ordered
    """
    rows, width = mine.shape[0], mine.shape[1] // ctx.size
    sent = np.empty((ctx.size, width, rows), mine.dtype)
    for rank, part in enumerate(sent):
        copy_kernels.copy(part, mine[:, rank * width : (rank + 1) * width].T)
    received = np.empty_like(sent)
    MPI.Comm.Alltoall(ctx.comm, sent, received)
    return received.transpose(1, 0, 2).reshape(width, rows * ctx.size)


def _elements(rows: NDArray[np.int64], cols: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Numbers in [-0.5, 0.5) that any rank can compute, by row and column."""
    mixed = (rows.astype(np.uint32) * np.uint32(2654435761))[:, None] ^ (
        (cols.astype(np.uint32) + np.uint32(seed)) * np.uint32(2246822519)
    )
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(3266489917)
    mixed ^= mixed >> np.uint32(13)
    return mixed / 2.0**32 - 0.5


@routine("gflops", "error")
def fft(
    ctx: Context, n: int = 1 << 20, seconds: float = 1.0, fault: float = 0.0
) -> tuple[float, float]:
    """GFLOP/s of a complex128 transform of length n, all ranks together.

    Parameters
    ----------
    n : int
        Rounded up to the square of a multiple of the number of ranks. Memory: 96 n bytes over all
        ranks.
    seconds : float
        The best of all transforms within this time, at least three; one is as slow as its slowest
        rank.
    fault : float
        Added to an element of the result on rank 0 before the validation, to test the validation.

    Returns
    -------
    gflops : float
        5 n log2(n) flops a transform, all ranks together.
    error : float
        The larger one of ``|x - inverse(X)|`` and, for one coefficient, ``|X[k] - sum_j x[j]
        exp(-2 pi i j k / n)| / sqrt(n)``, over ``eps log2(n)``. At most 16.

    Raises
    ------
    Failure
        BadArgumentError if n is not positive or is too large; RoutineError if the error exceeds its
        limit.

    Notes
    -----
    The six-step algorithm: three transposes (MPI_Alltoall), local transforms by SciPy. The
    result is in natural order. Sources: Bailey, "FFTs in external or hierarchical memory", J.
    Supercomputing 4 (1990); HPC Challenge 1.5, FFT/mpifft.c. HPCC validates by the round trip only.
    """
    check_range("n", n, MAX_NBYTES * ctx.size // 16)
    side = ctx.size * -(-(math.isqrt(n - 1) + 1) // ctx.size)
    n, rows = side**2, side // ctx.size
    mine = np.arange(ctx.rank * rows, (ctx.rank + 1) * rows)
    twiddles = np.exp(np.outer(mine, np.arange(side)) * (-2j * np.pi / n))
    rng = np.random.default_rng(ctx.rank)
    x = rng.random((rows, side)) - 0.5 + 1j * (rng.random((rows, side)) - 0.5)
    found = [x]

    def transform() -> None:
        found[0] = six_steps(ctx, x, twiddles)

    times = turn_times(ctx, transform, seconds)
    (X,) = found
    if ctx.rank == 0:
        X[0, 0] += fault
    back = six_steps(ctx, X.conj(), twiddles).conj() / n
    error = max(float(np.abs(x - back).max()), _coefficient_error(ctx, x, X))
    gflops = 5e-9 * n * math.log2(n) / float(times.min()) if n > 1 else 0.0
    return gflops, validated(ctx, "fft", error / (EPS * max(1.0, math.log2(n))))


def six_steps(ctx: Context, x: NDArray[Any], twiddles: NDArray[Any]) -> NDArray[Any]:
    """This rank's rows of the transform of x, both as square matrices in row order. Collective.

    Parameters
    ----------
    x, twiddles : ndarray, shape (s / ranks, s)
        `twiddles`: exp(-2 pi i j k / s^2) for this rank's rows j and all columns k.
    """
    y = scipy.fft.fft(transposed(ctx, x), axis=1, overwrite_x=True)
    y *= twiddles
    y = scipy.fft.fft(transposed(ctx, y), axis=1, overwrite_x=True)
    return transposed(ctx, y)


def _coefficient_error(ctx: Context, x: NDArray[Any], X: NDArray[Any]) -> float:
    """Error of one coefficient that is computed by its definition, over sqrt(n). Collective."""
    n, count = x.size * ctx.size, x.size
    k = n // 3
    owner, at = divmod(k, count)
    turns = (np.arange(ctx.rank * count, (ctx.rank + 1) * count) * k) % n
    part = np.vdot(np.exp(turns * (2j * np.pi / n)), x)
    expected = ctx.comm.allreduce(complex(part), MPI.SUM)
    found = ctx.comm.bcast(complex(X.flat[at]) if ctx.rank == owner else None, owner)
    return float(abs(found - expected) / math.sqrt(n))


POLYNOMIAL = np.uint64(7)  # x^64 + x^2 + x + 1 over GF(2)
PERIOD = 1317624576693539401  # of the sequence of random numbers
LOOK_AHEAD = 1024  # updates that a rank may hold before it sends them: a rule of the benchmark
ERROR_LIMIT = 0.01
ONE, TOP = np.uint64(1), np.uint64(63)

Words = NDArray[np.uint64]


@routine("gups", "errors")
def random_access(
    ctx: Context, nbytes: int = 16 << 20, seconds: float = 1.0, fault: float = 0.0
) -> tuple[float, float]:
    """Billions of updates a second of a table of 8-byte words over all ranks.

    For each number a of a sequence: ``T[a mod N] ^= a``. A rank computes its part of the sequence
    and sends updates to the ranks that own the words, at most 1024 at a time.

    Parameters
    ----------
    nbytes : int
        Part of the table on a rank; the whole table is the largest power of two that fits. Larger
        than the caches.
    seconds : float
        Ends before the 4 N updates of the benchmark if they would take longer.
    fault : float
        Share of each rank's words that are changed before the validation, to test the validation.

    Returns
    -------
    gups : float
        10^9 updates a second, all ranks together.
    errors : float
        Share of the words that are wrong after the same updates have been made again, which
        restores the table. At most 0.01.

    Raises
    ------
    Failure
        BadArgumentError if `nbytes` is below 8 or too large; RoutineError if there are too many
        errors.

    Notes
    -----
    Two MPI_Alltoall calls for each 1024 updates of a rank. NumPy takes about 30 us for 1024
    updates, which bounds the rate of a rank to about 0.03 GUPS. Source: HPC Challenge 1.5,
    RandomAccess (sequence, look-ahead, share of errors).
    """
    check_range("nbytes", nbytes, MAX_NBYTES, least=8)
    bits = int(math.log2(nbytes // 8 * ctx.size))
    words = 1 << bits
    share = -(-words // ctx.size)
    base = min(words, ctx.rank * share)
    table = np.arange(base, min(words, base + share), dtype=np.uint64)
    steps = max(1, 4 * words // (ctx.size * LOOK_AHEAD))
    streams = ctx.rank * LOOK_AHEAD + np.arange(LOOK_AHEAD)
    begin = numbers_at(streams * steps)  # each stream is a part of the sequence

    def update(state: Words, count: int) -> Words:
        for _ in range(count):
            ctx.check()
            state = following(state)
            mine = _exchanged(ctx, state, words, share)
            np.bitwise_xor.at(table, (mine & np.uint64(words - 1)) - np.uint64(base), mine)
        return state

    first = max(1, min(16, steps // 16))
    ctx.comm.Barrier()
    start = time.perf_counter()
    state = update(begin, first)
    took = (time.perf_counter() - start) / first
    more: int = ctx.comm.bcast(min(steps - first, max(1, int(seconds / max(took, 1e-7)))))
    ctx.comm.Barrier()
    start = time.perf_counter()
    update(state, more)
    took = ctx.comm.allreduce(time.perf_counter() - start, MPI.MAX)
    gups = 1e-9 * more * LOOK_AHEAD * ctx.size / took if more else 0.0
    table[: math.ceil(fault * table.size)] ^= ONE
    update(begin, first + more)
    wrong = int((table != np.arange(base, base + table.size, dtype=np.uint64)).sum())
    errors = ctx.comm.allreduce(wrong, MPI.SUM) / words
    return gups, validated(ctx, "random_access: share of wrong words", errors, ERROR_LIMIT)


def following(numbers: Words) -> Words:
    """The next number of the sequence after each of these."""
    return (numbers << ONE) ^ ((numbers >> TOP) * POLYNOMIAL)


def numbers_at(places: NDArray[np.int64]) -> Words:
    """The numbers at these places of the sequence, which begins with 1 at place 0.

    As HPCC's `HPCC_starts`: the number at place 2 n is a linear function over GF(2) of the one at
    place n, so each takes 63 steps.
    """
    squares, power = np.empty(64, np.uint64), np.ones(1, np.uint64)
    for bit in range(64):
        squares[bit] = power[0]
        power = following(following(power))
    found = np.ones(places.shape, np.uint64)
    places = places % PERIOD
    for bit in range(62, -1, -1):
        doubled = np.zeros_like(found)
        for i, square in enumerate(squares):
            doubled ^= np.where((found >> np.uint64(i)) & ONE, square, np.uint64(0))
        odd = (places >> bit) & 1 == 1
        found = np.where(odd, following(doubled), doubled)
    return found


def _exchanged(ctx: Context, numbers: Words, words: int, share: int) -> Words:
    """The updates of this rank's words among the numbers of all ranks. Collective."""
    if ctx.size == 1:
        return numbers
    owners = ((numbers & np.uint64(words - 1)) // np.uint64(share)).astype(np.int64)
    counts = np.bincount(owners, minlength=ctx.size)
    sent = numbers[np.argsort(owners, kind="stable")]
    theirs = np.empty_like(counts)
    MPI.Comm.Alltoall(ctx.comm, counts, theirs)
    received = np.empty(int(theirs.sum()), np.uint64)
    MPI.Comm.Alltoallv(ctx.comm, [sent, counts], [received, theirs])
    return received


@routine("gflops", "residual")
def hpl(
    ctx: Context, n: int = 2000, seconds: float = 1.0, fault: float = 0.0
) -> tuple[float, float]:
    """GFLOP/s of the solution of A x = b by LU with tournament pivoting, all ranks together.

    Parameters
    ----------
    n : int
        Memory: about 34 n^2 bytes over all ranks.
    seconds : float
        The best of all solutions within this time, at least one after a warm-up.
    fault : float
        Added to x[0] before the validation, to test the validation.

    Returns
    -------
    gflops : float
        2/3 n^3 + 3/2 n^2 flops, all ranks together.
    residual : float
        ``|A x - b| / (eps n (|A| |x| + |b|))`` in the infinity norm, as in HPL. At most 16.

    Raises
    ------
    Failure
        BadArgumentError if n is not positive or is too large; RoutineError if the residual
        exceeds its limit.

    Notes
    -----
    `linalg.solve`, on rows of the matrix: it does not scale like HPL's two-dimensional grid, and
    compares machines of one size. The other routines of this library block in MPI; this
    one waits as `linalg` does. Source: Petitet et al., HPL 2.3, testing/ptest/HPL_pdtest.c.
    """
    check_range("n", n, int((MAX_NBYTES * ctx.size / 34) ** 0.5))
    rng = np.random.default_rng(ctx.rank)
    A, b = ctx.empty((n, n), np.float64), ctx.empty((n, 1), np.float64)
    block(A)[...] = rng.random(block(A).shape) - 0.5
    block(b)[...] = rng.random(block(b).shape) - 0.5
    found: list[DistMatrix] = []

    def work() -> None:
        found[:] = [solve(ctx, A, b)]

    times = turn_times(ctx, work, seconds, least=1, warm_up=1)
    x = ctx.to_layout(found[0], "STAR_STAR").local.reshape(n).copy()
    x[0] += fault
    gap = np.abs(block(A) @ x - block(b)[:, 0]).max(initial=0)
    norm_A = max(of_all_ranks(ctx, float(np.abs(block(A)).sum(axis=1).max(initial=0))))
    norm_b = max(of_all_ranks(ctx, float(np.abs(block(b)).max(initial=0))))
    residual = gap / (EPS * n * (norm_A * np.abs(x).max() + norm_b))
    flops = 2 / 3 * n**3 + 3 / 2 * n**2
    return 1e-9 * flops / float(times.min()), validated(ctx, "hpl", float(residual))


N_SYSTEM, N_TRANSPOSE, N_FFT, N_GRID = 1500, 2000, 1 << 20, 32


@routine("measures", "ranks")
def kernels(ctx: Context, seconds: float = 1.0) -> tuple[list[str], list[str]]:
    """All kernels, in about three times `seconds`, with results as `ali.hpc.suite`'s."""
    half_s = seconds / 2
    found: list[Measure] = [
        (f"hpl, n = {N_SYSTEM}", hpl(ctx, N_SYSTEM, half_s)[0], "GFLOP/s", True),
        (f"ptrans, n = {N_TRANSPOSE}", ptrans(ctx, N_TRANSPOSE, half_s)[0], "GB/s", True),
        ("random access", 1e3 * random_access(ctx, seconds=half_s)[0], "MUPS", True),
        (f"fft, n = 2^{math.log2(N_FFT):.0f}", fft(ctx, N_FFT, half_s)[0], "GFLOP/s", True),
        (f"hpcg, {N_GRID}^3 points a rank", hpcg(ctx, N_GRID, seconds=seconds)[0], "GFLOP/s", True),
    ]
    return as_json(found), about(ctx)


@routine("hpl", "hpcg")
def weak(ctx: Context, seconds: float = 1.0) -> tuple[float, float]:
    """GFLOP/s of HPL and HPCG; a rank has as many elements and points in every gang."""
    n = round(N_SYSTEM * ctx.size**0.5)
    return hpl(ctx, n, seconds)[0], hpcg(ctx, N_GRID, seconds=seconds)[0]


def bare_weak(gang: GangView, seconds: float) -> tuple[float, float]:
    """The same in a plain MPI program, without Ray."""
    return weak(Context(gang, {}), seconds)


def bare(gang: GangView, seconds: float) -> list[list[str]]:
    """The kernels in a plain MPI program, without Ray."""
    return list(kernels(Context(gang, {}), seconds))
