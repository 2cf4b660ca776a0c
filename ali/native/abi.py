"""The structures and function types of ``include/alchemist.h``, field by field."""

from __future__ import annotations

import ctypes
from typing import Any

from mpi4py import MPI

from mpi_workers.wire.signature import MATRIX

ABI = 3
HOST = 3  # of the functions that libraries may call
SYMBOL = "alchemist_library_describe"
OK, FAILED, ENDED = 0, 1, 2
REFUSED = 1  # the kind of a failure: bad arguments
TYPES = (
    MATRIX, "int", "float", "bool", "string", "complex",
    "list[int]", "list[float]", "list[bool]", "list[string]",
)  # fmt: skip

CComm: Any = ctypes.c_int if MPI._sizeof(MPI.COMM_NULL) == 4 else ctypes.c_void_p


class CMatrix(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("dtype", ctypes.c_int),
        ("layout", ctypes.c_int),
        ("grid_height", ctypes.c_int32),
        ("grid_width", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("local_rows", ctypes.c_int64),
        ("local_cols", ctypes.c_int64),
        ("leading_dimension", ctypes.c_int64),
        ("row_shift", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("col_shift", ctypes.c_int64),
        ("col_stride", ctypes.c_int64),
        ("row_block", ctypes.c_int64),
        ("col_block", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )


class CUnion(ctypes.Union):
    _fields_ = (
        ("matrix", ctypes.c_void_p),
        ("integer", ctypes.c_int64),
        ("number", ctypes.c_double),
        ("complex_number", ctypes.c_double * 2),
        ("flag", ctypes.c_int32),
        ("pointer", ctypes.c_void_p),  # of a string, and of every list
    )


class CValue(ctypes.Structure):
    _anonymous_ = ("of",)
    _fields_ = (("given", ctypes.c_int32), ("count", ctypes.c_int64), ("of", CUnion))


class CCall(ctypes.Structure):
    _fields_ = (
        ("host", ctypes.c_void_p),
        ("comm", CComm),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("grid_height", ctypes.c_int32),
        ("grid_width", ctypes.c_int32),
        ("state", ctypes.c_void_p),
    )


NEW_MATRIX = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int
)
TO_LAYOUT = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
CHECK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
PROGRESS = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_double, ctypes.c_char_p)
FAIL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)
SPAN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)
RUN = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(CCall), ctypes.POINTER(CValue), ctypes.POINTER(CValue)
)
CLOSE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class CHost(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_int32),
        ("new_matrix", NEW_MATRIX),
        ("to_layout", TO_LAYOUT),
        ("allocate", ALLOCATE),
        ("check", CHECK),
        ("progress", PROGRESS),
        ("fail", FAIL),
        ("span", SPAN),
    )


class CParameter(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int),
        ("doc", ctypes.c_char_p),
        ("default_value", ctypes.c_char_p),
    )


class CResult(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("type", ctypes.c_int), ("doc", ctypes.c_char_p))


class CRoutine(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("doc", ctypes.c_char_p),
        ("run", RUN),
        ("parameters", ctypes.POINTER(CParameter)),
        ("results", ctypes.POINTER(CResult)),
    )


class CLibrary(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("doc", ctypes.c_char_p),
        ("routines", ctypes.POINTER(CRoutine)),
        ("close", CLOSE),
    )


ITEMS: dict[str, Any] = {
    "list[int]": ctypes.c_int64,
    "list[float]": ctypes.c_double,
    "list[bool]": ctypes.c_int32,
    "list[string]": ctypes.c_char_p,
}
