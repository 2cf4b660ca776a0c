"""Functions that test_stated.py runs on ranks: errors and peak memory of every routine."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from ali import blocks, registry
from ali.files import exchange, zarr3
from ali.files.routines import load as load_routine
from ali.files.routines import save as save_routine
from ali.linalg import learning, local_products, reductions, triangular
from mpi_workers.failures import Failure
from mpi_workers.matrix import pairwise
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.sparse_matrix import SparseMatrix
from mpi_workers.matrix.storage import Storage
from mpi_workers.rank.gang_view import GangView
from tests.ali import routine_table
from tests.ali.ranks_linalg_checks import Array, Checks

MATRICES = routine_table.MATRICES
EPS = float(np.finfo("float32").eps)
MEMORY: dict[str, dict[str, Any]] = {
    "cond": {"A": "Q"},
    "det": {"A": "Q"},
    "random_features_ridge": {"tol": 1.0},
}
PANEL = 1 << 20  # 1 MiB instead of 32: panels are stated apart


def _shape(name: str, plain: dict[str, Array]) -> tuple[int, ...]:
    return plain["T" if name != "eye" else "Q"].shape


def _sized(given: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Arguments with the numbers of rows and columns."""
    m, n = shape
    sizes = {"m": m, "n": n, "3n": 3 * n}
    return {key: sizes.get(x, x) if isinstance(x, str) else x for key, x in given.items()}


FORMATS = ("npy", "h5", "zarr", "parquet", "csv")
LIBRARIES = routine_table.LIBRARIES
data = routine_table.data


def loaded(check: Checks, library: str) -> Any:
    module = importlib.import_module(registry.SHIPPED[library])
    if hasattr(module, "load"):
        try:
            module.load(check.ctx.state, None)
        except Failure as failure:  # the test sees the text of a traceback
            raise ImportError(f"{failure.kind}: {failure.message}") from None
    return module


def errors(gang: GangView, library: str) -> dict[str, float]:
    """The largest error of each routine, in units of float32's epsilon."""
    check, found = Checks(gang), {}
    module = loaded(check, library)
    plain = data(library, 2000, 20, 200, gang.size)
    for name, cases in LIBRARIES[library].items():
        worst = 0.0
        for given, error in cases:
            kinds = {"dtype": "float32"} if name in ("eye", "full", "zeros") else {}
            used = {k: v for k, v in given.items() if k in MATRICES and type(v) is str}
            taken = [
                plain[v].astype("float32") if plain[v].dtype.kind == "f" else plain[v]
                for v in used.values()
            ]
            matrices = {k: check.matrix(a) for k, a in zip(used, taken, strict=True)}
            results = getattr(module, name)(
                check.ctx, **(_sized(given, _shape(name, plain)) | kinds | matrices)
            )
            results = results if isinstance(results, tuple) else (results,)
            whole = [check.value(x) for x in results]
            wide = [
                x.astype("complex128" if x.dtype.kind == "c" else "float64")
                if hasattr(x, "astype") and x.dtype.kind in "fc" else x
                for x in (*taken, *whole)
            ]  # fmt: skip
            worst = max(worst, float(error(*wide)))
        found[name] = worst / EPS
    return found


def memory(gang: GangView, library: str) -> dict[str, float]:
    """Peak memory of a rank in each routine, over its share of the arguments and results."""
    check, found = alone(gang), {}
    module = loaded(check, library)
    order = 2000 if library == "linalg" else 1200  # Debian's ScaLAPACK may have a slow BLAS
    few, plain = (
        data(library, *shape, gang.size) for shape in ((2000, 20, 200), (100_000, 40, order))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "LARGE", PANEL)
        for tuned in (blocks, learning):
            patch.setattr(tuned, "PANEL", PANEL)
        for tuned in (blocks, triangular, local_products):
            patch.setattr(tuned, "CHUNK", PANEL // 8)
        for name, cases in LIBRARIES[library].items():
            given = cases[0][0] | MEMORY.get(name, {})
            used = {k: v for k, v in given.items() if k in MATRICES and type(v) is str}
            for sizes in (few, plain):  # the first call loads code
                matrices = {k: check.matrix(sizes[v]) for k, v in used.items()}
                arguments = _sized(given, _shape(name, sizes)) | matrices
                if sizes is few:
                    getattr(module, name)(check.ctx, **arguments)
            held = sum(map(_nbytes, matrices.values()))
            results, most = peak(
                gang, lambda name=name, args=arguments: getattr(module, name)(check.ctx, **args)
            )
            results = results if isinstance(results, tuple) else (results,)
            share = held + sum(map(_nbytes, results))
            del results, matrices, arguments
            found[name] = max(gang.comm.allgather((held + most) / share))
    return found


def _nbytes(value: Any) -> int:
    """Bytes of this rank's part of a matrix; 0 of another value."""
    own = value.packed if isinstance(value, SparseMatrix) else value
    return int(own.local.nbytes) if isinstance(own, DistMatrix) else 0


def alone(gang: GangView) -> Checks:
    """A gang whose pool keeps nothing, so that all memory of a call is new."""
    return Checks(
        GangView(
            MPI.COMM_WORLD, Storage(gang.rank, Pool(0, shared=True)), lambda *_: None, gang.folder
        )
    )


def peak(gang: GangView, call: Callable[[], Any]) -> tuple[Any, int]:
    """The results of a call, and the most memory that this rank takes meanwhile, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    gang.comm.Barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status("VmRSS")
    results = call()
    return results, _status("VmHWM") - before


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{key}:\s+(\d+) kB", text)[0]) * 1024


def files(gang: GangView) -> dict[str, float]:
    """Peak memory of `save` and `load` by format, as `memory`; elements come back exactly."""
    check, found = alone(gang), {}
    folder = gang.comm.bcast(tempfile.mkdtemp() if gang.rank == 0 else None)
    values = np.random.default_rng(1).standard_normal((100_000, 40))
    few, all_rows = (check.distribute(values[:m]) for m in (100, 100_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "PIECE", PANEL)
        patch.setattr(exchange, "DIRECT_PIECE", PANEL)
        patch.setattr(pairwise, "MESSAGE", PANEL)
        patch.setattr(zarr3, "STORED_NBYTES", PANEL)
        for suffix in FORMATS:
            path = f"{folder}/{suffix}.{suffix}"
            for A in (few, all_rows):  # the first calls load code
                _, written = peak(gang, lambda A=A, path=path: save_routine(check.ctx, A, path))
                B, read = peak(gang, lambda path=path: load_routine(check.ctx, path)[0])
            assert np.array_equal(B.local, A.local), suffix
            share = A.local.nbytes
            for name, most in (("save", written + share), ("load", read)):
                found[f"{name} {suffix}"] = max(gang.comm.allgather(most / share))
            del B
    gang.comm.Barrier()
    if gang.rank == 0:
        shutil.rmtree(folder)
    return found
