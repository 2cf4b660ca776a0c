"""Files of sparse matrices: SciPy's .npz, Matrix Market, PETSc. Rank 0 reads and writes them.

PETSc's (``MatView`` with a binary viewer) are big-endian: four integers, the number of elements in
each row, columns, elements. They do not say of which type: their size does.
"""

from __future__ import annotations

import gzip
import os
from itertools import pairwise
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
from mpi_workers.matrix.sparse_rows import INT32_MAX
from mpi_workers.protocol.files import SPARSE_SUFFIXES


def _checked(path: str) -> None:
    require(
        path.endswith(SPARSE_SUFFIXES),
        "BadArgumentError",
        f"{path}: a sparse matrix is in a file of SciPy (.npz, scipy.sparse.save_npz) or of Matrix "
        "Market (.mtx, .mtx.gz), or in PETSc's binary format (.petsc)",
    )


PETSC_ID = 1211216  # of a matrix, MAT_FILE_CLASSID


def _read_petsc(path: str) -> csr_array:
    raw = np.fromfile(path, np.uint8)
    for integer in (">i4", ">i8"):  # of a PETSc with 32-bit or 64-bit indices
        size = np.dtype(integer).itemsize
        head = raw[: 4 * size].view(integer)
        if len(head) == 4 and head[0] == PETSC_ID:
            break
    else:
        raise ValueError("it has no matrix in PETSc's binary format")
    _, m, n, count = head.tolist()
    ends = np.cumsum([4 * size, m * size, count * size])
    each = (len(raw) - int(ends[-1])) // max(count, 1)
    if count < 0 or (each not in (8, 16) and count) or len(raw) < ends[-1]:
        raise ValueError("it is dense, cut off, or not in double precision")
    lengths, columns = (raw[a:b].view(integer).astype(np.int64) for a, b in pairwise(ends))
    elements = raw[ends[-1] :].view(">c16" if each == 16 else ">f8")[:count]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    found = csr_array((elements.astype(elements.dtype.newbyteorder("=")), columns, starts), (m, n))
    found.check_format(full_check=True)
    return found


def _write_petsc(path: str, whole: csr_array) -> None:
    integer = ">i4" if max(*whole.shape, whole.nnz) <= INT32_MAX else ">i8"
    real = whole.dtype.kind != "c"
    with open(path, "wb") as file:
        for part in ([PETSC_ID, *whole.shape, whole.nnz], np.diff(whole.indptr), whole.indices):
            file.write(np.asarray(part, integer).tobytes())
        file.write(whole.data.astype(">f8" if real else ">c16").tobytes())


@routine("A", pure=True)
def load_sparse(ctx: Context, path: str) -> SparseMatrix:
    """Read a sparse matrix from a file that rank 0 sees.

    Parameters
    ----------
    path : str
        ``.npz`` of `scipy.sparse.save_npz`, Matrix Market's ``.mtx`` or ``.mtx.gz``, or PETSc's
        binary format in double precision, ``.petsc``.

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
            if path.endswith(".petsc"):
                return coo_array(_read_petsc(path))
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
        ``.npz`` of `scipy.sparse.save_npz`, Matrix Market's ``.mtx`` or ``.mtx.gz``, or PETSc's
        binary format in double precision, ``.petsc``.

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
            elif path.endswith(".petsc"):
                _write_petsc(hidden, whole)
            else:
                opened = gzip.open if path.endswith(".gz") else open
                with opened(hidden, "wb") as file:
                    mmwrite(file, whole, precision=np.finfo(np.float64).precision + 2)
            os.replace(hidden, path)
        finally:
            if os.path.exists(hidden):
                os.unlink(hidden)

    on_rank_0(ctx, path, write)
