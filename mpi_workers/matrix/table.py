"""The table of a rank's matrices, in a file without a name that outlives the rank.

A row says where a matrix is and what it is. It is written when the matrix is made and removed
before its memory is used again, each with one system call and without a message. A rank that is
started again reads the table of the one before.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack

UNIT = 128  # bytes: a row has a whole number of them, and freed ones are used again
DEAD, UNSEALED, SEALED, TAINTED = 0, 1, 2, 4  # of a row; the last one is added to the others
# State, units, bytes of the map, elements that have arrived, the loan with the last of them.
_HEAD = struct.Struct("<BxHIQQ")
_STATE, _COUNTS = struct.Struct("<B"), struct.Struct("<QQ")
_COUNTS_AT = _HEAD.size - _COUNTS.size


class Row(NamedTuple):
    """A matrix in the table; `about`: see `mpi_workers.matrix.storage`."""

    ident: int
    about: dict[str, Any]
    sealed: bool
    tainted: bool
    received: int
    counted: int


class MatrixTable:
    """A table, as its rank writes it.

    Attributes
    ----------
    fd : int
        Of the file.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("alchemist-table", os.MFD_CLOEXEC)
        self._end = 0
        self._places: dict[int, tuple[int, int, int]] = {}  # by matrix: offset, units, state
        self._free: dict[int, list[int]] = {}  # offsets, by units

    def put(self, row: Row) -> None:
        """Add a matrix, in place of one with its id."""
        self.remove(row.ident)
        packed: bytes = msgpack.packb([row.ident, row.about])
        units = -(-(_HEAD.size + len(packed)) // UNIT)
        free = self._free.get(units)
        if free:
            at = free.pop()
        else:
            at, self._end = self._end, self._end + units * UNIT
        state = (SEALED if row.sealed else UNSEALED) | TAINTED * row.tainted
        head = _HEAD.pack(state, units, len(packed), row.received, row.counted)
        os.pwrite(self.fd, (head + packed).ljust(units * UNIT, b"\0"), at)
        self._places[row.ident] = at, units, state

    def mark(self, ident: int, *, sealed: bool = False, tainted: bool = False) -> None:
        """Note that a matrix is complete, or that a lost process may write into its memory."""
        at, units, state = self._places[ident]
        state = (SEALED | state & TAINTED if sealed else state) | TAINTED * tainted
        self._places[ident] = at, units, state
        os.pwrite(self.fd, _STATE.pack(state), at)

    def count(self, ident: int, received: int, loan: int) -> None:
        """Note how many elements have arrived, with the last loan among them."""
        os.pwrite(self.fd, _COUNTS.pack(received, loan), self._places[ident][0] + _COUNTS_AT)

    def remove(self, ident: int) -> None:
        """Remove a matrix, if it is there."""
        if (place := self._places.pop(ident, None)) is not None:
            at, units, _ = place
            os.pwrite(self.fd, _STATE.pack(DEAD), at)
            self._free.setdefault(units, []).append(at)


def rows(fd: int) -> Iterator[Row]:
    """The rows of a table whose rank has ended."""
    raw = os.pread(fd, os.fstat(fd).st_size, 0)
    at = 0
    while at + _HEAD.size <= len(raw):
        state, units, nbytes, received, counted = _HEAD.unpack_from(raw, at)
        if not units:
            return
        if state:
            with contextlib.suppress(ValueError):  # the rank has ended while it wrote this row
                ident, about = msgpack.unpackb(raw[at + _HEAD.size : at + _HEAD.size + nbytes])
                sealed, tainted = bool(state & SEALED), bool(state & TAINTED)
                yield Row(ident, about, sealed, tainted, received, counted)
        at += units * UNIT
