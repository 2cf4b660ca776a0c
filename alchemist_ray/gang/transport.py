"""How an attached process reaches a gang: directly, or (`gateway.transport`) through a gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.control_channel import ControlChannel, OnRenewal, open_socket_channel
from mpi_workers.data.description import DataEndpoints
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.wire.frames import Body

RESUME_S = 10.0


class Transport(Protocol):
    """Opens the connections of one process to one gang.

    Attributes
    ----------
    resume_s : float
        How long a call tries to restore a control channel that was lost.
    """

    resume_s: float

    def open_channel(self, hello: Body, on_renewal: OnRenewal) -> ControlChannel | None:
        """A channel to the dispatcher; None if it cannot be reached. See `SocketChannel`."""

    def renew(self, address: GangAddress) -> None:
        """The gang was started again: its next incarnation is there."""

    def open_nodes(self, watch: Callable[[], object]) -> NodeConnections:
        """The connections for data; see `NodeConnections` for `watch`."""


class DirectTransport:
    """By the sockets of the gang itself."""

    resume_s = RESUME_S

    def __init__(self, address: GangAddress) -> None:
        self._address = address

    def open_channel(self, hello: Body, on_renewal: OnRenewal) -> ControlChannel | None:
        return open_socket_channel(self._address, hello, on_renewal)

    def renew(self, address: GangAddress) -> None:
        self._address = address

    def open_nodes(self, watch: Callable[[], object]) -> NodeConnections:
        endpoints = DataEndpoints(self._address.token, self._address.nodes)
        return NodeConnections(endpoints, watch=watch)
