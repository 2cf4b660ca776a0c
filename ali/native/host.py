"""The C ABI of ``include/alchemist.h``: structures, and functions that a native library can call.

Errors of MPI that native code ignores, and a library that ends its process, are named.

The gang is lost then, but code 0 and no word would be all that the user saw of the cause.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ali.interface import Context
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.matrix.dist_matrix import DTYPES, DistMatrix
from mpi_workers.matrix.layout import Runs, layout_of, number_of
from mpi_workers.wire.signature import MATRIX

if TYPE_CHECKING:
    from mpi_workers.rank.gang import Gang


ABI = 3
HOST = 3  # of the functions that libraries may call
SYMBOL = "alchemist_library_describe"
OK, FAILED, ENDED = 0, 1, 2
REFUSED = 1  # the kind of a failure: bad arguments
TYPES = (
    MATRIX, "int", "float", "bool", "string", "complex",
    "list[int]", "list[float]", "list[bool]", "list[string]",
)  # fmt: skip
READ, WRITTEN = 1 | 1 << 8, 1 | 2 << 8  # types of parameters: a matrix, and whether it changes

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


class Frame:
    """One call on this rank: its values in C, and the objects to keep alive until it returns."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.failure: BaseException | None = None
        self.refused = False
        self.ended = False  # the library was told that the call is over
        self.message: str | None = None
        self.spans: list[Any] = []  # that have begun
        self._kept: list[Any] = []
        self._matrices: dict[int, tuple[CMatrix, DistMatrix]] = {}

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` new zero bytes."""
        memory = ctypes.create_string_buffer(max(1, nbytes))
        self._kept.append(memory)
        return ctypes.addressof(memory)

    def address(self, matrix: DistMatrix) -> int:
        """The address of the C description of a matrix."""
        about = described(matrix)
        where = ctypes.addressof(about)
        self._matrices[where] = about, matrix
        return where

    def matrix(self, where: int | None) -> tuple[CMatrix, DistMatrix]:
        """The description at this address, and its matrix."""
        if not where:
            raise Failure("RoutineError", "was not set on this rank")
        found = self._matrices.get(where)
        if found is None:
            raise Failure(
                "RoutineError",
                "is not a matrix of this call: return one of alchemist_new or alchemist_to_layout, "
                "or an argument",
            )
        return found

    def _result(self, where: int | None) -> DistMatrix:
        """The matrix at an address, with the number of dimensions that the library has set."""
        about, matrix = self.matrix(where)
        ndim = about.dimensions
        if ndim not in (0, 1, 2) or matrix.shape[ndim:] != (1, 1)[ndim:]:
            raise Failure(
                "RoutineError",
                f"has {ndim} dimensions, and {matrix.shape[0]} rows and {matrix.shape[1]} columns",
            )
        return matrix.with_ndim(ndim)

    def store(self, value: Any, kind: str) -> CValue:
        """An argument as a C value."""
        if value is None:
            return CValue(given=0)
        stored = CValue(given=1)
        match kind:
            case "matrix":
                stored.matrix = self.address(value)
            case "int":
                stored.integer = value
            case "float":
                stored.number = value
            case "bool":
                stored.flag = value
            case "complex":
                stored.complex_number[0], stored.complex_number[1] = value.real, value.imag
            case "string":
                text = ctypes.create_string_buffer(_bytes(value))
                self._kept.append(text)
                stored.pointer = ctypes.addressof(text)
            case _:
                items = [_bytes(v) for v in value] if kind == "list[string]" else value
                array = (ITEMS[kind] * max(1, len(items)))(*items)
                self._kept.append(array)
                stored.count, stored.pointer = len(items), ctypes.addressof(array)
        return stored

    def load(self, stored: CValue, kind: str) -> Any:
        """A result as a Python value."""
        match kind:
            case "matrix":
                return self._result(stored.matrix)
            case "int":
                return stored.integer
            case "float":
                return stored.number
            case "bool":
                return bool(stored.flag)
            case "complex":
                return complex(*stored.complex_number)
            case "string":
                if not stored.pointer:
                    if self.context.rank != 0:  # only rank 0 must set what is not a matrix
                        return ""
                    raise Failure("RoutineError", "was not set on this rank")
                return text_of(ctypes.string_at(stored.pointer))
        if stored.count < 0 or (stored.count and not stored.pointer):
            raise Failure("RoutineError", f"is a list of {stored.count} elements at a null address")
        if not stored.count:
            return []
        array = (ITEMS[kind] * stored.count).from_address(stored.pointer)
        if kind == "list[string]":
            return [text_of(item) for item in array]
        return [bool(item) for item in array] if kind == "list[bool]" else list(array)


class Host:
    """The struct of functions for a library, and the call that they belong to.

    One per library, valid while it is loaded: the library may keep the pointer.
    """

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.functions = CHost(
            HOST,
            NEW_MATRIX(self._new_matrix),
            TO_LAYOUT(self._to_layout),
            ALLOCATE(self._allocate),
            CHECK(self._check),
            PROGRESS(self._progress),
            FAIL(self._fail),
            SPAN(self._span),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.functions)

    def _guarded(self, action: Callable[[Frame], Any]) -> Any:
        """The result of `action`, or None: exceptions must not pass through native code."""
        if self.frame is None:
            return None  # a thread of the library called after the routine had returned
        try:
            return action(self.frame)
        except BaseException as error:
            self.frame.failure = error
            return None

    def _new_matrix(self, _: Any, rows: int, cols: int, dtype: int, layout: int) -> Any:
        def make(frame: Frame) -> int:
            if not 1 <= dtype <= len(DTYPES):
                raise Failure("RoutineError", f"the library requested the unknown dtype {dtype}")
            shape = (rows, cols)
            return frame.address(frame.context.zeros(shape, DTYPES[dtype - 1], _layout(layout)))

        return self._guarded(make)

    def _to_layout(self, _: Any, source: int, layout: int) -> Any:
        def move(frame: Frame) -> int:
            _, matrix = frame.matrix(source)
            moved = frame.context.to_layout(matrix, _layout(layout))
            return source if moved is matrix else frame.address(moved)

        return self._guarded(move)

    def _allocate(self, _: Any, nbytes: int) -> Any:
        return self._guarded(lambda frame: frame.allocate(nbytes))

    def _check(self, _: Any) -> int:
        try:
            if self.frame is not None:
                self.frame.context.check()
        except Interrupted:
            if self.frame is not None:
                self.frame.ended = True
            return ENDED
        return OK

    def _progress(self, _: Any, fraction: float, text: bytes | None) -> None:
        self._guarded(lambda frame: frame.context.progress(fraction, text_of(text)))

    def _fail(self, _: Any, kind: int, message: bytes | None) -> None:
        if self.frame is not None:
            self.frame.refused, self.frame.message = kind == REFUSED, text_of(message)

    def _span(self, _: Any, name: bytes | None) -> None:
        def mark(frame: Frame) -> None:
            if name is not None:
                span = frame.context.span(text_of(name))
                span.__enter__()
                frame.spans.append(span)
            elif frame.spans:
                frame.spans.pop().__exit__(None)

        self._guarded(mark)


def _layout(number: int) -> str:
    try:
        return layout_of(number)
    except ValueError:
        raise Failure(
            "RoutineError", f"the library requested the unknown layout {number}"
        ) from None


def described(matrix: DistMatrix) -> CMatrix:
    """A rank's part of a matrix as C sees it; `data` is its address in this process."""
    both = matrix.distribution.runs(matrix.rank)
    rows, cols = both or (Runs(0, 1, 1), Runs(0, 1, 1))
    m, n = matrix.shape if both else (0, 0)
    return CMatrix(
        *matrix.shape,
        DTYPES.index(matrix.dtype.name) + 1,
        number_of(matrix.layout),
        *matrix.grid,
        matrix.ndim,
        rows.count(m),
        cols.count(n),
        matrix.leading_dimension,
        rows.first,
        rows.period,
        cols.first,
        cols.period,
        rows.width,
        cols.width,
        matrix.local.ctypes.data,
    )


def _bytes(text: str) -> bytes:
    if "\0" in text:
        raise Failure("BadArgumentError", f"a C string cannot contain a zero byte: {text[:40]!r}")
    return text.encode()


def text_of(raw: bytes | None) -> str:
    """A C string as text; NULL is empty."""
    return (raw or b"").decode(errors="replace")


@contextmanager
def ignored_errors_raised(gang: Gang, what: str) -> Iterator[None]:
    """Run native code in the block; `what` names it in messages.

    Communicators that it derives from the gang's report their errors in later blocks too.

    Raises
    ------
    Failure
        RoutineError, if an MPI function has failed on this rank and the code has returned
        without an error of its own.
    """
    gang.enter_native()
    error = None
    try:
        yield
    finally:
        error = gang.leave_native()
    if error is not None:
        raise Failure(
            "RoutineError", f"{what} on rank {gang.rank} ignored an error of MPI: {error}"
        )
