"""MLlib's linear algebra on a gang, with MLlib's names, arguments and results.

Call the functions with a matrix, or change one import::

    from pyspark.mllib.linalg.distributed import RowMatrix      # MLlib computes
    from alchemist_ray.clients.spark.mllib import RowMatrix     # the gang computes

The gang is that of the only open session of this process, or of ``session=``. Matrices that a
function sends are freed before it returns. Distributed results are lazy (see `to_spark`): they stay
in the gang's memory until Spark has dropped them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyspark.mllib.linalg import DenseMatrix, DenseVector, QRDecomposition
from pyspark.mllib.linalg import distributed as theirs
from pyspark.sql import SparkSession

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.clients.default_session import current_session
from alchemist_ray.clients.spark import jvm
from alchemist_ray.clients.spark.results import MLLIB, to_spark
from alchemist_ray.errors import BadArgumentError, DtypeError
from alchemist_ray.session.alchemist_session import AlchemistSession

__all__ = [
    "BlockMatrix", "CondEst", "IndexedRowMatrix", "RowMatrix", "SingularValueDecomposition",
    "columnSimilarities", "computeGramianMatrix", "computePrincipalComponents", "computeSVD",
    "multiply", "tallSkinnyQR",
]  # fmt: skip

GRAM = 2048  # columns: up to here the Gram matrix is the fastest method
# Relative to the largest singular value. From a Gram matrix, singular vectors of smaller values
# lose half of their digits.
GRAM_RESOLUTION = 1e-4


@dataclass(frozen=True)
class SingularValueDecomposition:
    """A = U diag(s) V^T, as in MLlib."""

    U: Any
    s: DenseVector
    V: DenseMatrix


def computeSVD(
    matrix: Any,
    k: int,
    computeU: bool = False,
    rCond: float = 1e-9,
    *,
    session: AlchemistSession | None = None,
) -> SingularValueDecomposition:
    """Leading singular values and vectors of a distributed matrix.

    Parameters
    ----------
    matrix : RowMatrix, IndexedRowMatrix, or any source of `send_matrix`
        Of shape (m, n).
    k : int
        Number of singular values, 1 to n.
    computeU : bool
        Whether to compute U.
    rCond : float
        Values below ``rCond`` times the largest are treated as zero and left out.
    session : AlchemistSession, optional
        Default: the only open session.

    Returns
    -------
    SingularValueDecomposition
        `U` has the matrix's type and row numbers (or is None), `s` is a DenseVector, descending,
        `V` a DenseMatrix of n rows. The signs of vectors are not determined.

    Raises
    ------
    BadArgumentError
        If k is out of range.

    Notes
    -----
    Method: up to 2048 columns the Gram matrix; if it does not resolve the smallest value (below
    1e-4 of the largest), and for wider matrices, ARPACK. The error is rounding times the largest
    value; that of MLlib, which takes roots of the Gram matrix's eigenvalues, is 1e-8 times it.
    """
    with _sent(session, matrix) as (linalg, A):
        m, n = A.shape
        if not 1 <= k <= n:
            raise BadArgumentError(f"computeSVD: k={k} must be 1 to {n}, the number of columns")
        rank = min(k, m, n)
        method = "gram" if min(m, n) <= GRAM else "arpack"
        S, U, V = linalg.truncated_svd(A, rank=rank, method=method)
        s = S.fetch()
        if method == "gram" and s[-1] < GRAM_RESOLUTION * s[0]:
            S, U, V = linalg.truncated_svd(A, rank=rank)
            s = S.fetch()
        kept = int(np.count_nonzero(s > rCond * s[0])) if s[0] > 0 else 0
        if not kept:
            raise BadArgumentError(
                "computeSVD: all elements are zero, so there is no positive singular value"
            )
        if computeU and kept < rank:
            U = linalg.slice(U, col_start=0, col_stop=kept)
    left = _as_mllib(U, matrix) if computeU else None
    return SingularValueDecomposition(
        left, DenseVector(s[:kept]), _dense(V.fetch(cols=slice(0, kept)))
    )


def computePrincipalComponents(
    matrix: Any, k: int, *, session: AlchemistSession | None = None
) -> DenseMatrix:
    """The k leading principal components of the rows, as columns of an (n, k) DenseMatrix.

    As MLlib's `RowMatrix.computePrincipalComponents` up to signs: the element of largest absolute
    value of each component is positive. k is at most min(m, n).
    """
    with _sent(session, matrix) as (linalg, A):
        return _dense(linalg.pca(A, k=k)[0].fetch().T)


def computeGramianMatrix(matrix: Any, *, session: AlchemistSession | None = None) -> DenseMatrix:
    """A^T A, an (n, n) DenseMatrix."""
    with _sent(session, matrix) as (linalg, A):
        return _dense(linalg.gram(A).fetch())


def multiply(matrix: Any, other: Any, *, session: AlchemistSession | None = None) -> Any:
    """The product of two BlockMatrix, or of a matrix of rows and a local DenseMatrix.

    Returns
    -------
    RowMatrix, IndexedRowMatrix or BlockMatrix
        Of the type of `matrix`. Blocks have the rows of its blocks and the columns of the blocks of
        `other`.

    Raises
    ------
    ShapeError
        If the inner dimensions differ.
    DtypeError
        If MLlib does not multiply such a pair.
    """
    blocks = isinstance(matrix, theirs.BlockMatrix), isinstance(other, theirs.BlockMatrix)
    if any(blocks) and not all(blocks):
        raise DtypeError(
            f"multiply takes two BlockMatrix, or a matrix of rows and a local DenseMatrix; not a "
            f"{type(matrix).__name__} and a {type(other).__name__}"
        )
    with _sent(session, matrix, other) as (linalg, A, B):
        return _as_mllib(linalg.matmul(A, B), matrix, other)


def tallSkinnyQR(
    matrix: Any, computeQ: bool = False, *, session: AlchemistSession | None = None
) -> QRDecomposition[Any, DenseMatrix]:
    """A = Q R: R is an upper triangular (n, n) DenseMatrix, Q has the matrix's type or is None.

    The signs of R's rows are not determined, as in MLlib. m must be at least n.
    """
    with _sent(session, matrix) as (linalg, A):
        if A.shape[0] < A.shape[1]:
            m, n = A.shape
            raise BadArgumentError(
                f"tallSkinnyQR: the matrix is {m} x {n}, with fewer rows than columns"
            )
        Q, R = linalg.qr(A)
    return QRDecomposition(_as_mllib(Q, matrix) if computeQ else None, _dense(R.fetch()))


def columnSimilarities(
    matrix: Any, threshold: float = 0.0, *, session: AlchemistSession | None = None
) -> theirs.CoordinateMatrix:
    """Cosines between columns, above the diagonal.

    They are exact for any `threshold`; MLlib samples those below it.
    """
    if not threshold >= 0:
        raise BadArgumentError(f"columnSimilarities: threshold={threshold}: it must be at least 0")
    als = session or current_session()
    with _sent(als, matrix) as (linalg, A):
        gram = linalg.gram(A).fetch()
    lengths = np.sqrt(np.diag(gram))
    lengths[lengths == 0] = 1
    cosines = np.triu(gram / np.outer(lengths, lengths), 1)
    found: theirs.CoordinateMatrix = to_spark(als.send_matrix(cosines), kind="CoordinateMatrix")
    return found


def CondEst(matrix: Any, *, session: AlchemistSession | None = None) -> float:
    """Condition number in the 2-norm, of any shape: largest over smallest singular value.

    It is inf for a matrix without full rank. Named after the wrapper of the paper (Gittens et al.
    2018). `linalg.condest` alone estimates the condition number in the 1-norm, of square matrices;
    ``ord="2"`` is this one.
    """
    with _sent(session, matrix) as (linalg, A):
        return float(linalg.condest(A, ord="2"))


# --- by changing one import -------------------------------------------------------------


# Any: the signatures differ from MLlib's in an optional `session`.
_Rows: Any = theirs.RowMatrix
_IndexedRows: Any = theirs.IndexedRowMatrix


class RowMatrix(_Rows):
    """MLlib's, with its linear algebra on the gang."""

    computeSVD = computeSVD
    computePrincipalComponents = computePrincipalComponents
    computeGramianMatrix = computeGramianMatrix
    multiply = multiply
    tallSkinnyQR = tallSkinnyQR
    columnSimilarities = columnSimilarities


class IndexedRowMatrix(_IndexedRows):
    """MLlib's, with its linear algebra on the gang."""

    computeSVD = computeSVD
    computeGramianMatrix = computeGramianMatrix
    multiply = multiply
    columnSimilarities = columnSimilarities


class BlockMatrix(theirs.BlockMatrix):
    """MLlib's, with `multiply` on the gang."""

    multiply = multiply


# --- between the two ----------------------------------------------------------------------


@contextlib.contextmanager
def _sent(session: AlchemistSession | None, *matrices: Any) -> Iterator[tuple[Any, ...]]:
    """The library on the gang, and the matrices there; they are freed at the end."""
    als = session or current_session()
    with contextlib.ExitStack() as stack:
        handles = []
        for matrix in matrices:
            handles.append(als.send_matrix(matrix))
            stack.callback(handles[-1].free)
        yield als.load_library("linalg"), *handles


def _dense(array: NDArray[Any]) -> DenseMatrix:
    m, n = array.shape
    return DenseMatrix(m, n, np.asarray(array, np.float64).ravel(order="F"))


def _as_mllib(handle: Handle, like: Any, other: Any = None) -> Any:
    """A result as a matrix of the same class as the argument."""
    kind = next(kind for kind, (matrix, _) in MLLIB.items() if isinstance(like, matrix))
    blocks = kind == "BlockMatrix"
    block = (int(like.rowsPerBlock), int(other.colsPerBlock)) if blocks else None
    found = to_spark(handle, kind=kind, block=block)
    if kind == "IndexedRowMatrix":  # rows that the argument does not have are zero on the gang
        spark: Any = SparkSession.builder.getOrCreate()
        present = spark._jvm.alchemist.spark.Matrices.present
        javas = [matrix._java_matrix_wrapper._java_model for matrix in (found, like)]
        what = "find the rows of an IndexedRowMatrix"
        some = jvm.run(spark, what, lambda: present(*javas), gang_of(handle).ping)
        found = found if some is None else theirs.IndexedRowMatrix(some)
    if type(like).__module__ == __name__:
        # A second wrapper of the JVM's matrix would release it when the first is dropped.
        found.__class__ = type(like)
    return found
