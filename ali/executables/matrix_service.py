"""Serves the gang's matrices to the program of a rank: `ali/include/alchemist_client.h` asks.

The program maps the memory of its rank's part, so no element is copied. Requests and replies are
the structs of the header, on a Unix socket that only the two processes have.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ali.native.abi import CMatrix
from ali.native.host import described
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DTYPES, DistMatrix
from mpi_workers.matrix.layout import layout_of

if TYPE_CHECKING:
    from mpi_workers.rank.gang import Gang

ATTACH, CREATE = 1, 2
ANSWER_S = 10.0  # time limit for a program to read answers that have filled its socket
VERSION = 2


class _Request(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int32),
        ("operation", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("layout", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("name", ctypes.c_char * 128),
    )


class _Reply(ctypes.Structure):
    _fields_ = (
        ("failed", ctypes.c_int32),
        ("nbytes", ctypes.c_int64),
        ("matrix", CMatrix),
        ("message", ctypes.c_char * 512),
    )


class MatrixService:
    """One rank's matrices for its program.

    Attributes
    ----------
    child_end : socket
        The program inherits it.
    made : dict of str to DistMatrix
        The matrices that the program has created, in the order of their names.
    """

    def __init__(self, gang: Gang, given: Mapping[str, DistMatrix]) -> None:
        self._gang = gang
        self._given = given
        self._made: dict[str, DistMatrix] = {}
        self._socket, self.child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)

    @property
    def made(self) -> dict[str, DistMatrix]:
        return dict(sorted(self._made.items()))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        self.child_end.close()

    def serve(self) -> bool:
        """Answer one request; False at the end of the program."""
        try:
            data = self._socket.recv(2 * ctypes.sizeof(_Request))
            if not data:
                return False
            reply, descriptors = self._answer(data)
            socket.send_fds(self._socket, [bytes(reply)], descriptors)
        except ConnectionError:
            return False
        return True

    def _answer(self, data: bytes) -> tuple[_Reply, list[int]]:
        try:
            matrix = self._matrix(data)
            segment = matrix.block.segment
            if segment.fd < 0:
                raise ValueError("its memory on this rank is not shared")
            reply = _Reply(nbytes=segment.nbytes, matrix=described(matrix))
            return reply, [segment.fd]
        except (ValueError, Failure) as error:
            return _Reply(failed=1, message=str(error).encode()[:511]), []

    def _matrix(self, data: bytes) -> DistMatrix:
        if len(data) != ctypes.sizeof(_Request) or int.from_bytes(data[:4], "little") != VERSION:
            raise ValueError(
                "the program was compiled with another version of alchemist_client.h: compile it "
                "with that of `alchemist include`"
            )
        request = _Request.from_buffer_copy(data)
        name = request.name.decode(errors="replace")
        known = {**self._given, **self._made}
        if request.operation == ATTACH:
            if name not in known:
                names = ", ".join(sorted(known)) or "none"
                raise ValueError(f"there is no matrix {name!r}: run_program was given {names}")
            return known[name]
        if name in known or not name:
            raise ValueError(f"a matrix {name!r} cannot be created: the name is empty or in use")
        made = self._gang.new(*_shape_and_kind(request))
        self._made[name] = made
        return made


def _shape_and_kind(request: Any) -> tuple[tuple[int, ...], str, str]:
    if not 0 < request.dtype <= len(DTYPES):
        raise ValueError(f"dtype {request.dtype} does not exist")
    if request.dimensions not in (1, 2) or request.rows < 0 or request.cols < 0:
        raise ValueError(f"{request.rows} x {request.cols} is not a shape")
    shape = (request.rows, request.cols)[: request.dimensions]
    return shape, DTYPES[request.dtype - 1], layout_of(request.layout)
