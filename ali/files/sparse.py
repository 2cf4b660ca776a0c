"""Files of sparse matrices: SciPy's .npz, Matrix Market. Rank 0 reads and writes them."""

from __future__ import annotations

import gzip
import os
from typing import Any

import numpy as np
from scipy.io import mmread, mmwrite
from scipy.sparse import coo_array, csr_array, load_npz, save_npz, vstack

from ali.blocks import require
from ali.files.paths import on_rank_0
from ali.interface import Context, routine
from mpi_workers.failures import Failure
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.sparse_matrix import SparseMatrix
from mpi_workers.wire.names import SPARSE_SUFFIXES


def _checked(path: str) -> None:
    require(
        path.endswith(SPARSE_SUFFIXES),
        "BadArgumentError",
        f"{path}: a sparse matrix is in a file of SciPy (.npz, scipy.sparse.save_npz) or of Matrix "
        "Market (.mtx, .mtx.gz)",
    )


@routine("A", pure=True)
def load_sparse(ctx: Context, path: str) -> SparseMatrix:
    """Read a sparse matrix from a file that rank 0 sees.

    Parameters
    ----------
    path : str
        ``.npz`` of `scipy.sparse.save_npz`, or Matrix Market's ``.mtx`` or ``.mtx.gz``.

    Returns
    -------
    A : sparse matrix

    Raises
    ------
    FileError
        If it cannot be read.
    DtypeError
        If a matrix cannot have its dtype.

    Notes
    -----
    Rank 0 holds all of the file meanwhile.
    """
    _checked(path)

    def read() -> coo_array:
        try:
            found = load_npz(path) if path.endswith(".npz") else mmread(path, spmatrix=False)
            return coo_array(found)
        except Exception as error:  # of the libraries that read it
            raise Failure("FileError", f"{path} is not a sparse matrix: {error}") from None

    whole: Any = on_rank_0(ctx, path, read)
    about = ctx.comm.bcast(None if whole is None else (whole.shape, whole.dtype.name))
    shape, name = about
    require(name in DTYPES, "DtypeError", f"{path}: a matrix cannot have dtype {name}")
    if whole is None:
        whole = coo_array(shape, dtype=name)
    return ctx.sparse_from_triplets(whole.row, whole.col, whole.data, shape)


@routine(writes=())
def save_sparse(ctx: Context, A: SparseMatrix, path: str) -> None:
    """Write a sparse matrix to a file that rank 0 sees, which is replaced in one step.

    Parameters
    ----------
    A : sparse matrix
    path : str
        ``.npz`` of `scipy.sparse.save_npz`, or Matrix Market's ``.mtx`` or ``.mtx.gz``.

    Raises
    ------
    FileError
        If it cannot be written.

    Notes
    -----
    Rank 0 holds all of the matrix meanwhile.
    """
    _checked(path)
    parts = ctx.comm.gather(A.local)

    def write() -> None:
        assert parts is not None
        whole = csr_array(vstack(parts, format="csr"))
        folder, name = os.path.split(path)
        hidden = os.path.join(folder, f".{os.getpid()}.part.{name}")
        try:
            if path.endswith(".npz"):
                save_npz(hidden, whole)
            else:
                opened = gzip.open if path.endswith(".gz") else open
                with opened(hidden, "wb") as file:
                    mmwrite(file, whole, precision=np.finfo(np.float64).precision + 2)
            os.replace(hidden, path)
        finally:
            if os.path.exists(hidden):
                os.unlink(hidden)

    on_rank_0(ctx, path, write)
