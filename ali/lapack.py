"""LAPACK's auxiliary routines, which SciPy exports for Cython only."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from scipy.linalg import cython_lapack


class Routine:
    """A subroutine, called with Fortran's conventions: everything by reference.

    Parameters
    ----------
    name : str
        Such as ``"dlaed4"``.
    arguments : int
        Number of its arguments.
    """

    def __init__(self, name: str, arguments: int) -> None:
        capsule = cython_lapack.__pyx_capi__[name]
        api = ctypes.pythonapi
        api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = (
            ctypes.c_char_p,
            [ctypes.py_object],
        )
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        address = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
        self._function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(address)

    def __call__(self, *arguments: Any) -> None:
        """Call it with arrays, int, float, and ctypes values, which receive results."""
        kept = []
        for value in arguments:
            if isinstance(value, int):
                value = ctypes.c_int(value)
            elif isinstance(value, float):
                value = ctypes.c_double(value)
            kept.append(value)
        self._function(
            *(
                value.ctypes.data if isinstance(value, np.ndarray) else ctypes.addressof(value)
                for value in kept
            )
        )
