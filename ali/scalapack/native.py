"""ScaLAPACK's functions, called with Fortran's conventions.

Every argument is passed by reference; the length of a CHARACTER follows hidden after all other
arguments. Integers have 32 bits (LP64). The interpreter lock is released during a call, which
cannot be interrupted.

scalapack4py, the ctypes wrapper on the package index (1.0, MIT, maintained), is not used: its BLACS
grids span MPI_COMM_WORLD in row-major order, but ours must be column-major on a communicator that
changes after a failed call; it has no gelqf and no orglq; it checks with assertions, needs all its
functions at once, and leaves finding and preloading the library, work space and hidden lengths to
its caller. Only its table of argument types would remain, and passing by reference needs none.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ali.loader import symbol_file

LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
INT_MAX = 2**31 - 1

# For complex matrices some functions have another name.
COMPLEX_NAMES = {
    "p?orgqr": "p?ungqr",
    "p?orglq": "p?unglq",
    "p?syevd": "p?heevd",
    "p?ormqr": "p?unmqr",
    "p?ormlq": "p?unmlq",
}
FUNCTIONS = (
    "p?gemm", "p?gesv", "p?potrf", "p?getrf", "p?geqrf", "p?orgqr", "p?gelqf", "p?orglq",
    "p?gels", "p?syevd", "p?gesvd", "p?gebrd", "p?ormqr", "p?ormlq", "p?lange", "p?getrs",
    "p?gemr2d",
)  # fmt: skip
BLACS = (
    "Csys2blacs_handle", "Cfree_blacs_system_handle", "Cblacs_gridinit", "Cblacs_gridinfo",
    "Cblacs_gridexit",
)  # fmt: skip

# Functions by which a tuned BLAS is known: OpenBLAS, BLIS, MKL, ATLAS, FlexiBLAS, Arm's.
TUNED = (
    "openblas_get_config", "bli_info_get_version_str", "MKL_Get_Version_String", "ATL_buildinfo",
    "flexiblas_get_version", "armplversion_",
)  # fmt: skip


def symbol(name: str, dtype: np.dtype[Any]) -> str:
    """The name of ``"p?gemm"`` for a dtype: ``"pdgemm_"``."""
    if dtype.kind == "c":
        name = COMPLEX_NAMES.get(name, name)
    return name.replace("?", LETTERS[dtype.name]) + "_"


def symbols() -> list[str]:
    """The functions that a library must have."""
    return [symbol(name, np.dtype(d)) for name in FUNCTIONS for d in LETTERS] + list(BLACS)


class Native:
    """A ScaLAPACK that is loaded in this process.

    Attributes
    ----------
    path : str
        Its file.
    passed_over : list of str
        Candidates that could not be used, with the reasons.
    """

    def __init__(self, handle: ctypes.CDLL, path: str) -> None:
        self._handle = handle
        self.path = path
        self.passed_over: list[str] = []

    def missing(self) -> list[str]:
        """Required functions that it does not have."""
        return [name for name in symbols() if not hasattr(self._handle, name)]

    def openblas_core(self) -> str:
        """The processor for which its OpenBLAS has chosen kernels; empty for another BLAS."""
        try:
            function = self._handle.openblas_get_corename
        except AttributeError:
            return ""
        function.restype = ctypes.c_char_p
        return f" (OpenBLAS for {function().decode()})"

    def reference_blas(self) -> str | None:
        """The file of its BLAS, if that is the reference BLAS, which has no tuned kernels."""
        path = symbol_file(self._handle, "dgemm_")
        if path is None or not re.match(r"lib(ref)?blas\.so", Path(path).name):
            return None
        blas = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return None if any(hasattr(blas, name) for name in TUNED) else path

    def blacs(self, name: str, *arguments: Any) -> int:
        """Call a function of the BLACS' C interface."""
        return int(getattr(self._handle, name)(*arguments))

    def call(self, name: str, dtype: np.dtype[Any], *arguments: Any) -> None:
        """Call a subroutine of ScaLAPACK, e.g. ``"p?gemm"``, for a dtype.

        Integers and strings are passed by reference; arrays by their first element; a
        `ctypes.c_int` receives an output value.
        """
        function = getattr(self._handle, symbol(name, dtype))
        function.restype = None
        function(*_by_reference(arguments))

    def norm(self, dtype: np.dtype[Any], *arguments: Any) -> float:
        """Call ``p?lange``, the only function that returns a value."""
        function = getattr(self._handle, symbol("p?lange", dtype))
        single = dtype.name in ("float32", "complex64")
        function.restype = ctypes.c_float if single else ctypes.c_double
        return float(function(*_by_reference(arguments)))


def _by_reference(arguments: tuple[Any, ...]) -> list[Any]:
    passed: list[Any] = []
    for value in arguments:
        if isinstance(value, str):
            passed.append(ctypes.c_char_p(value.encode()))
        elif isinstance(value, np.ndarray):
            passed.append(ctypes.c_void_p(value.ctypes.data))
        elif isinstance(value, ctypes.c_int):
            passed.append(ctypes.byref(value))
        else:
            passed.append(ctypes.byref(ctypes.c_int(value)))
    hidden = [ctypes.c_size_t(len(value)) for value in arguments if isinstance(value, str)]
    return passed + hidden


def real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of absolute values."""
    return np.zeros(0, dtype).real.dtype


def scalar(value: complex, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A factor such as alpha, as an array to be passed."""
    return np.full(1, value, dtype)
