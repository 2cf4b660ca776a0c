"""ScaLAPACK's functions, called the way Fortran passes arguments.

Every argument goes by reference; a CHARACTER has its length, hidden, after all
others. Integers are 32 bits wide (LP64). The interpreter lock is free during a
call, which nothing can interrupt.

Why not scalapack4py, the ctypes wrapper on the package index (1.0, MIT, maintained): its
BLACS grids span MPI_COMM_WORLD's default context in row-major order, and ours must
be column-major on a communicator that is renewed after a failed call; it has no gelqf
and no orglq; it checks with assertions, wants all its functions there at once, and
leaves finding and preloading the library, work space and hidden lengths to its caller. What would
remain is the table of argument types, which references make unnecessary.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
INT_MAX = 2**31 - 1

# For complex matrices some functions have another name.
COMPLEX_NAMES = {"p?orgqr": "p?ungqr", "p?orglq": "p?unglq", "p?syevd": "p?heevd"}
FUNCTIONS = (
    "p?gemm", "p?gesv", "p?potrf", "p?getrf", "p?geqrf", "p?orgqr", "p?gelqf", "p?orglq",
    "p?gels", "p?syevd", "p?gesvd", "p?lange", "p?getrs", "p?gemr2d",
)  # fmt: skip
BLACS = (
    "Csys2blacs_handle", "Cfree_blacs_system_handle", "Cblacs_gridinit", "Cblacs_gridinfo",
    "Cblacs_gridexit",
)  # fmt: skip


def symbol(name: str, dtype: np.dtype[Any]) -> str:
    """What ``"p?gemm"`` is called for a dtype: ``"pdgemm_"``."""
    if dtype.kind == "c":
        name = COMPLEX_NAMES.get(name, name)
    return name.replace("?", LETTERS[dtype.name]) + "_"


def symbols() -> list[str]:
    """All that a library must have."""
    return [symbol(name, np.dtype(d)) for name in FUNCTIONS for d in LETTERS] + list(BLACS)


class Native:
    """A ScaLAPACK that is loaded in this process.

    Attributes
    ----------
    path : str
        Its file.
    passed_over : list of str
        What was found before it and could not be used, with the reasons.
    """

    def __init__(self, handle: ctypes.CDLL, path: str) -> None:
        self._handle = handle
        self.path = path
        self.passed_over: list[str] = []

    def missing(self) -> list[str]:
        """Functions that it lacks."""
        return [name for name in symbols() if not hasattr(self._handle, name)]

    def openblas_core(self) -> str:
        """For which processor its OpenBLAS computes, in words; empty if it has another BLAS."""
        try:
            function = self._handle.openblas_get_corename
        except AttributeError:
            return ""
        function.restype = ctypes.c_char_p
        return f" (OpenBLAS for {function().decode()})"

    def blacs(self, name: str, *arguments: Any) -> int:
        """Call a function of the BLACS' C interface."""
        return int(getattr(self._handle, name)(*arguments))

    def call(self, name: str, dtype: np.dtype[Any], *arguments: Any) -> None:
        """Call a subroutine of ScaLAPACK, e.g. ``"p?gemm"``, for a dtype.

        Integers and strings are passed by reference as they are; arrays by their
        first element; a `ctypes.c_int` takes what the subroutine returns in it.
        """
        function = getattr(self._handle, symbol(name, dtype))
        function.restype = None
        function(*_by_reference(arguments))

    def norm(self, dtype: np.dtype[Any], *arguments: Any) -> float:
        """Call ``p?lange``, the one function that returns a value."""
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
    """A factor such as alpha, as it is passed."""
    return np.full(1, value, dtype)
