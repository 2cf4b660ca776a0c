"""Arrow's C data interface: columns of any producer where they lie, without pyarrow.

Its structs are read as https://arrow.apache.org/docs/format/CDataInterface.html lays them out.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)
_RELEASE = ctypes.CFUNCTYPE(None, _POINTER)
_ERROR = ctypes.CFUNCTYPE(ctypes.c_char_p, _POINTER)


class _Schema(ctypes.Structure):
    format: bytes
    name: bytes | None
    metadata: int | None
    n_children: int
    children: Any
    dictionary: Any
    release: int | None


_Schema._fields_ = [
    ("format", ctypes.c_char_p), ("name", ctypes.c_char_p), ("metadata", _POINTER),
    ("flags", _SIZE), ("n_children", _SIZE), ("children", ctypes.POINTER(ctypes.POINTER(_Schema))),
    ("dictionary", ctypes.POINTER(_Schema)), ("release", _POINTER), ("private_data", _POINTER),
]  # fmt: skip


class _Array(ctypes.Structure):
    length: int
    null_count: int
    offset: int
    n_buffers: int
    buffers: Any
    children: Any
    dictionary: Any
    release: int | None


_Array._fields_ = [
    ("length", _SIZE), ("null_count", _SIZE), ("offset", _SIZE), ("n_buffers", _SIZE),
    ("n_children", _SIZE), ("buffers", ctypes.POINTER(_POINTER)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))), ("dictionary", ctypes.POINTER(_Array)),
    ("release", _POINTER), ("private_data", _POINTER),
]  # fmt: skip


class _Stream(ctypes.Structure):
    get_schema: int
    get_next: int
    get_last_error: int


_Stream._fields_ = [
    ("get_schema", _POINTER), ("get_next", _POINTER), ("get_last_error", _POINTER),
    ("release", _POINTER), ("private_data", _POINTER),
]  # fmt: skip


class Field(NamedTuple):
    """A column's description: `format` is the interface's, e.g. ``"l"`` of int64."""

    name: str
    format: str
    metadata: dict[bytes, bytes]
    children: tuple[Field, ...]
    dictionary: Field | None

    @property
    def extension(self) -> str:
        """The name of its extension type; empty for others."""
        return self.metadata.get(b"ARROW:extension:name", b"").decode()


class Part(NamedTuple):
    """Some rows of a column. They exist as long as something refers to `owner`."""

    array: _Array
    owner: object
    offset: int
    length: int

    def child(self, k: int, count: int = 1, start: int = 0) -> Part:
        """`count` elements of the k-th child for each row, from the `start`-th on."""
        array = self.array.children[k].contents
        offset = array.offset + start + self.offset * count
        return Part(array, self.owner, offset, self.length * count)

    def dictionary(self) -> Part:
        array = self.array.dictionary.contents
        return Part(array, self.owner, array.offset, array.length)

    def elements(self, dtype: Any, buffer: int = 1, more: int = 0) -> NDArray[Any]:
        """The elements of a buffer of fixed width, and some more: read-only, not copied."""
        kind = np.dtype(dtype)
        address, count = self.array.buffers[buffer], self.length + more
        if not address or not count:
            return np.empty(0, kind)
        return np.asarray(_Memory(self.owner, address + self.offset * kind.itemsize, kind, count))

    def bits(self, buffer: int = 1) -> NDArray[np.bool_]:
        """The elements of a buffer of bits."""
        first, last = self.offset // 8, (self.offset + self.length + 7) // 8
        packed = Part(self.array, self.owner, first, last - first).elements(np.uint8, buffer)
        skip = self.offset - 8 * first
        bits = np.unpackbits(packed, bitorder="little")[skip : skip + self.length]
        return bits.view(np.bool_)

    def valid(self) -> NDArray[np.bool_] | None:
        """Which rows are not null; None if no row is."""
        if not self.array.null_count or not self.array.n_buffers or not self.array.buffers[0]:
            return None
        found = self.bits(0)
        return None if found.all() else found

    def texts(self, kind: str) -> list[str | None]:
        """Strings, of the format `kind`."""
        valid = self.valid()
        found = []
        if kind == "vu":
            views = self.elements("V16")
            data = [self.array.buffers[k] for k in range(2, self.array.n_buffers - 1)]
            for view in views.tolist():
                size, _, buffer, start = struct.unpack("<iIII", view)
                at = None if size <= 12 else data[buffer] + start
                found.append(view[4 : 4 + size] if at is None else ctypes.string_at(at, size))
        else:
            ends = self.elements(np.int64 if kind == "U" else np.int32, more=1)
            base = self.array.buffers[2]
            for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
                found.append(ctypes.string_at(base + start, stop - start) if stop > start else b"")
        words = [text.decode() for text in found]
        return [w if valid is None or valid[i] else None for i, w in enumerate(words)]


class _Memory:
    """Memory of a producer for `numpy.asarray`, which keeps its owner."""

    def __init__(self, owner: object, address: int, dtype: np.dtype[Any], count: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, True), "typestr": dtype.str, "shape": (count,), "version": 3,
        }  # fmt: skip


class _Owned:
    """A struct that a producer fills, and that it releases when nothing refers to it."""

    def __init__(self, kind: type[ctypes.Structure]) -> None:
        self.struct: Any = kind()

    def __del__(self) -> None:
        if self.struct.release:
            _RELEASE(self.struct.release)(ctypes.addressof(self.struct))


def read_schema(data: Any) -> Field:
    """The description of something with ``__arrow_c_schema__``."""
    capsule = data.__arrow_c_schema__()
    return _field(_Schema.from_address(_address(capsule, b"arrow_schema")))


def read(data: Any) -> tuple[Field, list[Part]]:
    """The description and the parts of something with ``__arrow_c_stream__`` or ``..._array__``.

    Raises
    ------
    ValueError
        With the producer's words, if it cannot go on.
    """
    if not hasattr(data, "__arrow_c_stream__"):
        schema, capsule = data.__arrow_c_array__()
        array = _Array.from_address(_address(capsule, b"arrow_array"))
        field = _field(_Schema.from_address(_address(schema, b"arrow_schema")))
        return field, [Part(array, capsule, array.offset, array.length)]
    capsule = data.__arrow_c_stream__()
    address = _address(capsule, b"arrow_array_stream")
    stream = _Stream.from_address(address)

    def ask(function: int, kind: type[ctypes.Structure]) -> _Owned:
        owned = _Owned(kind)
        if _CALL(function)(address, ctypes.addressof(owned.struct)):
            words = _ERROR(stream.get_last_error)(address) or b"its stream has failed"
            raise ValueError(words.decode(errors="replace"))
        return owned

    described = ask(stream.get_schema, _Schema)
    field = _field(described.struct)
    parts = []
    while (owned := ask(stream.get_next, _Array)).struct.release:
        array = owned.struct
        parts.append(Part(array, owned, array.offset, array.length))
    return field, parts


_address: Callable[[Any, bytes], int] = ctypes.pythonapi.PyCapsule_GetPointer
_address.argtypes = [ctypes.py_object, ctypes.c_char_p]  # type: ignore[attr-defined]
_address.restype = _POINTER  # type: ignore[attr-defined]


def _field(schema: _Schema) -> Field:
    return Field(
        (schema.name or b"").decode(errors="replace"),
        schema.format.decode(),
        _metadata(schema.metadata),
        tuple(_field(schema.children[k].contents) for k in range(schema.n_children)),
        _field(schema.dictionary.contents) if schema.dictionary else None,
    )


def _metadata(address: int | None) -> dict[bytes, bytes]:
    """Keys and values, each after its length in four bytes."""
    if not address:
        return {}

    def taken() -> bytes:
        nonlocal address
        size = ctypes.c_int32.from_address(address).value
        found = ctypes.string_at(address + 4, size)
        address += 4 + size
        return found

    count = ctypes.c_int32.from_address(address).value
    address += 4
    return {taken(): taken() for _ in range(count)}
