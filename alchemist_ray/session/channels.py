"""Sessions whose running calls exchange fields, and programs that look at them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from alchemist_ray.arguments import positive_int
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.errors import BadArgumentError, SessionError
from mpi_workers.data.description import TransferTarget, view_ids, view_parts
from mpi_workers.data.transfers import MatrixReader
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution

POLL_INTERVAL_S = 0.02  # between looks for the next frame


def couple(a: Any, b: Any, name: str = "interface", *, fields: int = 2) -> None:
    """Let running calls of two sessions exchange fields: ``ctx.channel(name)`` in both.

    Counts for the calls that begin later, of this program; a program that attaches to a gang
    couples its own. Costs nothing until a call asks for the channel.

    Parameters
    ----------
    a, b : AlchemistSession
    name : str
        A gang may have several channels.
    fields : int
        A send waits while so many fields of that side were not taken.

    Raises
    ------
    BadArgumentError
        If both are of one gang, or they are reached in different ways: both through one gateway, or
        both inside the Ray cluster.
    SessionError
        If one has no workers.
    """
    if not isinstance(name, str) or not name:
        raise BadArgumentError(f"name={name!r}: it must be the name of a channel")
    positive_int("fields", fields)
    one, other = a.connection, b.connection
    if one.address.gang == other.address.gang:
        raise BadArgumentError("a channel has two gangs: both sessions use the same one")
    through = [c.address.addresses if c.transport.token else None for c in (one, other)]
    if through[0] != through[1]:
        raise BadArgumentError(
            f"gangs {one.address.gang} and {other.address.gang} are reached in different ways: "
            "connect to both through one gateway, or to both inside the Ray cluster"
        )
    one.channels[name], other.channels[name] = (other, fields), (one, fields)


class LiveView:
    """An array that a running call shows by ``ctx.show(name, A)``: see `AlchemistSession.watch`.

    Iterating gives each new frame, the newest if several are new, and waits in between.

    Attributes
    ----------
    frame : int
        Number of the frame that was read last, in its call; -1: none.
    """

    def __init__(self, connection: GangConnection, name: str) -> None:
        if connection.transport.token:
            raise SessionError("a session through a gateway cannot watch fields of running calls")
        self._connection = connection
        self._ids = view_ids(name)
        self.frame = -1

    def latest(self) -> NDArray[Any] | None:
        """The newest frame; None if no call shows one now, or each changes while it is read.

        Raises
        ------
        GroupFailedError
            If the gang has ended.
        """
        facts, stamps = view_parts(self._connection.grid)
        try:
            raw = self._read(0, *facts)
            unpacker = msgpack.Unpacker()
            unpacker.feed(raw.tobytes())
            shape, stored, dtype, layout = unpacker.unpack()
            distribution = Distribution(layout, tuple(stored), self._connection.grid)
            for _ in range(3):
                number = int(self._read(1, *stamps).min())
                if number < 0:
                    return None
                found = self._read(2 + number % 2, distribution, dtype)
                if int(self._read(1, *stamps).max()) < number + 2:  # no rank has written into it
                    self.frame = number
                    return found.reshape(shape)
        except Failure as failure:
            if failure.kind != "MatrixNotFoundError":
                self._connection.ping()
                raise
        return None

    def _read(self, which: int, distribution: Distribution, dtype: str) -> NDArray[Any]:
        target = TransferTarget(self._ids[which], distribution, np.dtype(dtype))
        found = np.empty(distribution.shape, target.dtype)
        with MatrixReader(self._connection.nodes, target) as reader:
            reader.read_block(found, (0, 0))
        return found

    def __iter__(self) -> Iterator[NDArray[Any]]:
        while True:
            before = self.frame
            if (found := self.latest()) is not None and self.frame != before:
                yield found
            self._connection.ping()
            time.sleep(POLL_INTERVAL_S)
