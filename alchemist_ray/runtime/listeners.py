"""The sockets of one incarnation of a gang, on which proxies and attached processes connect."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import NamedTuple

from alchemist_ray.runtime.nodes import Nodes
from mpi_workers.wire import sockets
from mpi_workers.wire.asynchronous import FrameProtocol, protocol_factory
from mpi_workers.wire.frames import Body, Frame


class NodePeer(NamedTuple):
    """A peer that is the proxy of a node, of some incarnation."""

    nodes: Nodes
    number: int


class Listeners:
    """Two sockets: for other nodes, and for this one. Accepted connections outlive them.

    Parameters
    ----------
    on_frame, on_lost, token, on_hello
        See `protocol_factory`.

    Attributes
    ----------
    addresses : list of str
    """

    def __init__(
        self,
        on_frame: Callable[[FrameProtocol, Frame], None],
        on_lost: Callable[[FrameProtocol], None],
        token: str,
        on_hello: Callable[[FrameProtocol, Body], Body],
    ) -> None:
        self._factory = protocol_factory(on_frame, on_lost, token, on_hello)
        self._servers: list[asyncio.Server] = []
        self.addresses: list[str] = []

    async def open(self, host: str, unix_path: str) -> None:
        """Listen at an address of this node, and at a path."""
        loop = asyncio.get_running_loop()
        for sock, address in (sockets.listen_unix(unix_path), sockets.listen_tcp(host)):
            self.addresses.append(address)
            self._servers.append(await self._serve(loop, sock))

    async def _serve(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> asyncio.Server:
        if sock.family == socket.AF_UNIX:
            return await loop.create_unix_server(self._factory, sock=sock, backlog=sockets.BACKLOG)
        return await loop.create_server(self._factory, sock=sock, backlog=sockets.BACKLOG)

    def close(self) -> None:
        """Accept no more connections."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
