"""A rank's side of the data path: it lends the memory of its matrices to its node's data endpoint.

A thread beside the rank's main thread keeps one connection to the endpoint. MAP asks for a matrix
and begins a loan: the memory is not recycled before UNMAP ends it. The rank counts the elements
that UNMAP reports as written. Memory that a lost process may still write is never used again.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, TypeGuard

from mpi_workers.data.description import MAX_KNOWN
from mpi_workers.failures import Failure
from mpi_workers.matrix.memory import MemoryBlock
from mpi_workers.matrix.storage import Entry, Storage
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import connect
from mpi_workers.wire.frames import Body, Kind


class LentBlock(NamedTuple):
    """A block that is lent. This reference keeps it from being recycled."""

    block: MemoryBlock
    entry: Entry
    write: bool


class RankMemory:
    """Lends a rank's storage to the data endpoint of its node.

    Parameters
    ----------
    storage : Storage
        The matrices.
    token : str
        The gang's secret.
    endpoint : str
        Address of the endpoint: a Unix socket.

    Raises
    ------
    Failure, OSError, WireError
        If the endpoint cannot be reached.
    """

    def __init__(self, storage: Storage, token: str, endpoint: str) -> None:
        fields = {"role": "rank", "rank": storage.rank}
        self._connection, _ = connect(endpoint, token, fields, take_fds=False)
        self._storage = storage
        self._loans: dict[int, LentBlock] = {}
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                frame = self._connection.recv()
                try:
                    self._answer(frame.kind, frame.body)
                except Failure as failure:
                    self._connection.send(Kind.REFUSED, failure.to_map())
        except (frames.WireError, OSError):
            pass  # the endpoint is gone: the gang ends
        finally:
            for loan in self._loans.values():
                if loan.write:
                    loan.block.taint()
            self._loans.clear()
            self._connection.close()

    def _answer(self, kind: Kind, body: Body) -> None:
        match kind:
            case Kind.MAP:
                self._map(body)
            case Kind.UNMAP:
                self._unmap(body)
            case _:
                raise Failure("TransferError", f"a rank does not accept {kind.name}")

    def _map(self, body: Body) -> None:
        write = body.get("write") is True
        entry = self._storage.entry(body.get("matrix"))
        if write and entry.sealed:
            raise Failure(
                "TransferError", f"matrix {body['matrix']} is complete and accepts no more data"
            )
        if not write:
            self._storage.sealed(body["matrix"])
        known, number = body.get("known", []), body.get("loan")
        if not isinstance(known, list) or len(known) > MAX_KNOWN or not all(map(_is_int, known)):
            words = f"'known' must be a list of up to {MAX_KNOWN} segment ids"
            raise Failure("TransferError", words)
        if not _is_int(number) or number in self._loans:
            raise Failure("TransferError", "this loan number is in use")
        matrix = entry.matrix
        segment = matrix.block.segment
        reply: dict[str, Any] = {
            "segment": segment.id,
            "nbytes": segment.nbytes,
            "dead": [k for k in known if not self._storage.pool.is_live(k)],
            "shape": list(matrix.shape),
            "layout": matrix.layout,
            "grid": list(matrix.grid),
            "dtype": matrix.dtype.name,
        }
        self._loans[number] = LentBlock(matrix.block, entry, write)
        self._connection.send(Kind.MAP, reply, fds=() if segment.id in known else (segment.fd,))

    def _unmap(self, body: Body) -> None:
        """End a loan; `tainted`: a process that is lost may still write."""
        loan = self._loans.pop(body.get("loan", 0), None)
        if loan is None:
            raise Failure("TransferError", "this loan has ended")
        if body.get("tainted") is True and loan.write:
            loan.block.taint()
        self._storage.count(loan.entry, int(body.get("written", 0)))
        del loan  # before the reply: a free may follow it
        self._connection.send(Kind.SYNC)


def _is_int(value: object) -> TypeGuard[int]:
    return type(value) is int  # bool is excluded
