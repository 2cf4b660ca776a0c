"""The connections of a thin client to one gang: a `gang.transport.Transport` through a gateway."""

from __future__ import annotations

from collections.abc import Callable

from alchemist_ray.errors import SessionError, from_failure
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.control_channel import ControlChannel, OnRenewal, SocketChannel
from alchemist_ray.gateway.node import GatewayNode
from alchemist_ray.gateway.protocol import GRACE_S, GatewayAddress
from alchemist_ray.gateway.secure_socket import connect
from mpi_workers.data.description import DataEndpoints, NodeAddress
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.failures import Failure
from mpi_workers.wire import frames
from mpi_workers.wire.frames import Body


class GatewayTransport:
    """See the module.

    Parameters
    ----------
    gateway : GatewayAddress
    token : str
    gang : str
        Id of the gang.
    """

    resume_s = GRACE_S

    def __init__(self, gateway: GatewayAddress, token: str, gang: str) -> None:
        self._gateway = gateway
        self._token = token
        self._gang = gang
        self._process = ""

    def renew(self, address: GangAddress) -> None:
        """The gang has other ranks now; the gateway's address stays."""

    def open_channel(self, hello: Body, on_renewal: OnRenewal) -> ControlChannel | None:
        self._process = hello["process"]
        fields = {
            "role": "client",
            "gang": self._gang,
            "process": self._process,
            "where": hello["where"],
        }
        try:
            connection, _ = connect(self._gateway, self._token, fields)
        except (OSError, frames.WireError):
            return None
        except Failure as failure:
            raise from_failure(failure) from None
        return SocketChannel(connection, str(self._gateway), on_renewal)

    def open_nodes(self, watch: Callable[[], object]) -> NodeConnections:
        def fields() -> Body:
            return {"role": "data", "gang": self._gang, "process": self._process}

        return NodeConnections(
            DataEndpoints("", (NodeAddress(0, 1, (str(self._gateway),)),)),
            watch=watch,
            connection_type=lambda node, _: GatewayNode(self._gateway, self._token, fields),
        )


def address_of(gateway: GatewayAddress, described: Body) -> GangAddress:
    """The address of a gang as the gateway describes it: all its ranks are behind one node."""
    try:
        return GangAddress(
            gang=described["gang"],
            session=described["session"],
            epoch=described["epoch"],
            first_epoch=described["first_epoch"],
            token="",
            addresses=(str(gateway),),
            nodes=(NodeAddress(0, int(described["size"]), (str(gateway),)),),
            incarnation=described["incarnation"],
            shared=described["shared"],
            lease_grace_s=described["lease_grace_s"],
            idle_timeout_s=described["idle_timeout_s"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SessionError(
            f"{gateway} sent a gang description that this version cannot read: {error}"
        ) from None
