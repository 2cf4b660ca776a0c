"""The C ABI of ``include/alchemist.h``: structures, and functions that a native library can call.

Errors of MPI that native code ignores, and a library that ends its process, are named.

The gang is lost then, but code 0 and no word would be all that the user saw of the cause.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ali import sparse_matrices
from ali.interface import Context
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.layout import Runs, layout_of, number_of
from mpi_workers.matrix.sparse_matrix import SparseMatrix
from mpi_workers.protocol.signature import MATRIX, SPARSE

if TYPE_CHECKING:
    from mpi_workers.rank.gang_view import GangView


ABI = 4
HOST = 7  # of the functions that libraries may call
SYMBOL = "alchemist_library_describe"
OK, FAILED, ENDED = 0, 1, 2
REFUSED = 1  # the kind of a failure: bad arguments
TYPES = (
    MATRIX, "int", "float", "bool", "string", "complex",
    "list[int]", "list[float]", "list[bool]", "list[string]", SPARSE,
)  # fmt: skip
READ, WRITTEN = 1 | 1 << 8, 1 | 2 << 8  # types of parameters: a matrix, and whether it changes

CComm: Any = ctypes.c_int if MPI._sizeof(MPI.COMM_NULL) == 4 else ctypes.c_void_p


INCLUDE = Path(__file__).parents[1] / "include"
C_TYPES: dict[str, Any] = {
    "void": None, "int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
    "double": ctypes.c_double, "size_t": ctypes.c_size_t, "char": ctypes.c_char, "MPI_Comm": CComm,
}  # fmt: skip
DECLARED = re.compile(
    r"^(?:typedef )?(enum|struct)(?: (\w+))? \{\n(.*?)^\} ?(\w*);"
    r"|^typedef (\w+) \(\*(\w+)\)\((.*?)\);",
    re.MULTILINE | re.DOTALL,
)


def declared(header: str, known: dict[str, Any]) -> dict[str, Any]:
    """The structures, enumerations and function types of a header of ours, and `known`."""
    found = dict(known)
    text = re.sub(r"/\*.*?\*/", "", (INCLUDE / header).read_text(), flags=re.DOTALL)
    for kind, tag, body, name, result, function, parameters in DECLARED.findall(text):
        if function:
            taken = (_type(one, found, ctypes.POINTER) for one in parameters.split(","))
            found[function] = ctypes.CFUNCTYPE(found[result], *taken)
        elif kind == "enum":
            found[name] = ctypes.c_int
        else:
            found[name or tag] = _structure(body, found)
    return found


def _structure(body: str, found: dict[str, Any]) -> type[ctypes.Structure]:
    inner = re.search(r"union \{(.*?)\};", body, re.DOTALL)
    fields: list[tuple[str, Any]] = []
    anonymous: tuple[str, ...] = ()
    if inner:
        body = body.replace(inner[0], "")
        anonymous = ("of",)
        members = [field for line in inner[1].split(";") for field in _members(line, found, None)]
        fields = [("of", type("Union", (ctypes.Union,), {"_fields_": members}))]
    own = [field for line in body.split(";") for field in _members(line, found, ctypes.POINTER)]
    made = {"_anonymous_": anonymous, "_fields_": own + fields}
    return type("Structure", (ctypes.Structure,), made)


def _members(line: str, found: dict[str, Any], pointer: Any) -> Iterator[tuple[str, Any]]:
    """The members that a line declares; `pointer` makes pointers to structures, None: addresses."""
    line = " ".join(line.split())
    if function := re.fullmatch(r"(.+?)\(\*(\w+)\)\((.*)\)", line):
        result, name, parameters = function.groups()
        taken = (_type(one, found, None, text_too=True) for one in parameters.split(","))
        yield name, ctypes.CFUNCTYPE(_type(result, found, None), *taken)
    elif line:
        start = re.match(r"(?:const )?\w+ ", line)
        assert start is not None
        for declarator in line[start.end() :].split(","):
            name = declarator.strip("* ").removeprefix("const *")
            stars = start[0] + "*" * declarator.count("*")
            kind = _type(stars, found, pointer, text_too=pointer is not None)
            length = re.search(r"\[(\d+)\]", name)
            yield name.partition("[")[0], kind * int(length[1]) if length else kind


def _type(text: str, found: dict[str, Any], pointer: Any, *, text_too: bool = False) -> Any:
    """A type of C, with or without the name of what has it."""
    words = text.replace("*", " * ").split()
    base = found.get(next(word for word in words if word != "const"))
    if "*" not in words:
        return base
    if text_too and words[:3] == ["const", "char", "*"]:
        return ctypes.c_char_p
    structure = isinstance(base, type) and issubclass(base, ctypes.Structure)
    return pointer(base) if pointer and structure else ctypes.c_void_p


STRUCTURES = declared("alchemist.h", C_TYPES)
CMatrix, CSparse, CValue, CCall, CHost, CLibrary = (
    STRUCTURES[f"alchemist_{name}"]
    for name in ("matrix", "sparse", "value", "call", "host", "library")
)


ITEMS: dict[str, Any] = {
    "list[int]": ctypes.c_int64,
    "list[float]": ctypes.c_double,
    "list[bool]": ctypes.c_int32,
    "list[string]": ctypes.c_char_p,
}


MEMBERS = {"int": "integer", "float": "number", "bool": "flag"}  # of alchemist_value


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
        self._matrices: dict[int, tuple[Any, DistMatrix]] = {}
        self._sparse: dict[int, tuple[Any, SparseMatrix]] = {}

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

    def device_address(self, matrix: DistMatrix) -> int:
        """The address of a copy of a matrix's part on the rank's GPU."""
        x = matrix.on_device()
        self._kept.append(x)
        return int(x.data_ptr())

    def matrix(self, where: int | None) -> tuple[Any, DistMatrix]:
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

    def sparse_address(self, matrix: SparseMatrix) -> int:
        """The address of the C description of a sparse matrix."""
        arrays = matrix.arrays(matrix.packed.rank)
        about = CSparse(
            *matrix.shape,
            matrix.nnz,
            *(DTYPES.index(kind.name) + 1 for kind in (matrix.dtype, matrix.form.index)),
            matrix.rows.start,
            len(matrix.rows),
            len(arrays[1]),
            *(array.ctypes.data for array in arrays),
        )
        where = ctypes.addressof(about)
        self._sparse[where] = about, matrix
        return where

    def _sparse_result(self, where: int | None) -> DistMatrix:
        _, matrix = self._sparse.get(where or 0, (None, None))
        if matrix is None:
            raise Failure("RoutineError", "is not one of alchemist_new_sparse, or an argument")
        if fault := matrix.fault():
            raise Failure("RoutineError", f"is not a sparse matrix: {fault}")
        return matrix.packed

    def shaped(self, where: int | None) -> DistMatrix:
        """The matrix at an address, with the number of dimensions that the library has set."""
        about, matrix = self.matrix(where)
        ndim = about.dimensions
        if ndim not in (0, 1, 2) or matrix.shape[ndim:] != (1, 1)[ndim:]:
            raise Failure(
                "RoutineError",
                f"has {ndim} dimensions, and {matrix.shape[0]} rows and {matrix.shape[1]} columns",
            )
        return matrix.with_ndim(ndim)

    def store(self, value: Any, kind: str) -> Any:
        """An argument as a C value."""
        if value is None:
            return CValue(given=0)
        stored = CValue(given=1)
        match kind:
            case "matrix":
                stored.matrix = self.address(value)
            case "sparse":
                stored.sparse = self.sparse_address(value)
            case "int" | "float" | "bool":
                setattr(stored, MEMBERS[kind], value)
            case "complex":
                stored.complex_number[0], stored.complex_number[1] = value.real, value.imag
            case "string":
                text = ctypes.create_string_buffer(_bytes(value))
                self._kept.append(text)
                stored.string = ctypes.addressof(text)
            case _:
                items = [_bytes(v) for v in value] if kind == "list[string]" else value
                array = (ITEMS[kind] * max(1, len(items)))(*items)
                self._kept.append(array)
                stored.count, stored.integers = len(items), ctypes.addressof(array)
        return stored

    def load(self, stored: Any, kind: str) -> Any:
        """A result as a Python value."""
        match kind:
            case "matrix":
                return self.shaped(stored.matrix)
            case "sparse":
                return self._sparse_result(stored.sparse)
            case "int" | "float" | "bool":
                value = getattr(stored, MEMBERS[kind])
                return bool(value) if kind == "bool" else value
            case "complex":
                return complex(*stored.complex_number)
            case "string":
                if not stored.string:
                    if self.context.rank != 0:  # only rank 0 must set what is not a matrix
                        return ""
                    raise Failure("RoutineError", "was not set on this rank")
                return text_of(ctypes.string_at(stored.string))
        if stored.count < 0 or (stored.count and not stored.integers):
            raise Failure("RoutineError", f"is a list of {stored.count} elements at a null address")
        if not stored.count:
            return []
        array = (ITEMS[kind] * stored.count).from_address(stored.integers)
        if kind == "list[string]":
            return [text_of(item) for item in array]
        return [bool(item) for item in array] if kind == "list[bool]" else list(array)


class Host:
    """The struct of functions for a library, and the call that they belong to.

    One per library, valid while it is loaded: the library may keep the pointer.
    """

    def __init__(self) -> None:
        self.frame: Frame | None = None
        kinds = dict(CHost._fields_)
        del kinds["abi"]
        self.functions = CHost(
            HOST, *(kind(getattr(self, f"_{name}")) for name, kind in kinds.items())
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

    def _new_sparse(self, _: Any, rows: int, cols: int, count: int, dtype: int) -> Any:
        def make(frame: Frame) -> int:
            if not 1 <= dtype <= len(DTYPES):
                raise Failure("RoutineError", f"the library requested the unknown dtype {dtype}")
            gang = frame.context.gang
            kind = DTYPES[dtype - 1]
            return frame.sparse_address(sparse_matrices.empty(gang, (rows, cols), kind, count))

        return self._guarded(make)

    def _to_layout(self, _: Any, source: int, layout: int) -> Any:
        def move(frame: Frame) -> int:
            _, matrix = frame.matrix(source)
            moved = frame.context.to_layout(matrix, _layout(layout))
            return source if moved is matrix else frame.address(moved)

        return self._guarded(move)

    def _device_pointer(self, _: Any, source: int) -> Any:
        def copied(frame: Frame) -> int:
            return frame.device_address(frame.matrix(source)[1])

        return self._guarded(copied)

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

    def _waited(self, _: Any, seconds: float) -> None:
        self._guarded(lambda frame: frame.context.gang.note_wait(seconds))

    def _channel_send(self, _: Any, name: bytes | None, source: int) -> int:
        return self._exchanged(source, lambda ctx, A: ctx.channel(text_of(name)).send(A))

    def _channel_receive(self, _: Any, name: bytes | None, source: int) -> int:
        return self._exchanged(source, lambda ctx, A: ctx.channel(text_of(name)).receive(out=A))

    def _show(self, _: Any, name: bytes | None, source: int) -> int:
        return self._exchanged(source, lambda ctx, A: ctx.show(text_of(name), A))

    def _exchanged(self, source: int, action: Callable[[Context, DistMatrix], object]) -> int:
        def act(frame: Frame) -> bool:
            action(frame.context, frame.shaped(source))
            return True

        if self._guarded(act):
            return OK
        ended = self.frame is None or isinstance(self.frame.failure, Interrupted)
        return ENDED if ended else FAILED

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


def described(matrix: DistMatrix) -> Any:
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
        raise Failure("BadArgumentError", f"has a zero byte, which ends a C string: {text[:40]!r}")
    return text.encode()


def text_of(raw: bytes | None) -> str:
    """A C string as text; NULL is empty."""
    return (raw or b"").decode(errors="replace")


@contextmanager
def ignored_errors_raised(gang: GangView, what: str) -> Iterator[None]:
    """Run native code in the block; `what` names it in messages.

    Communicators that it derives from the gang's report their errors in later blocks too.

    Raises
    ------
    Failure
        RoutineError, if an MPI function has failed on this rank and the code has returned
        without an error of its own.
    Interrupted
        If the code has left a wait in MPI, whatever it has made of the error.
    """
    gang.enter_native()
    error = None
    try:
        yield
    finally:
        error = gang.leave_native()
        if left := gang.left_in():
            interrupted = Interrupted()
            interrupted.place = f"MPI_{left.removesuffix('_c')} in {what}"
            raise interrupted
    if error is not None:
        raise Failure(
            "RoutineError", f"{what} on rank {gang.rank} ignored an error of MPI: {error}"
        )
