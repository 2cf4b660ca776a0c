"""The connections of a thin client to one gang: a `gang.connection.Transport` through a gateway.

Also `.remote` calls as futures.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from alchemist_ray.errors import SessionError, from_failure
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.control_channel import ControlChannel, OnRenewal, SocketChannel
from alchemist_ray.gang.libraries import results_of
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


THREADS = 32  # calls that wait at the same time; the gang runs one after the other anyway


class CallFuture(Future[Any]):
    """The result of a routine call that was not waited for: `result(timeout)` returns it.

    It is used like the futures of `concurrent.futures`, and can be awaited with
    `asyncio.wrap_future`.
    """

    def future(self) -> CallFuture:
        """This object: what the same method of a Ray ObjectRef returns."""
        return self


class GatewayCalls:
    """The calls of one connection that run in the background.

    Python waits at its end for the threads of a `ThreadPoolExecutor`, and so for the calls.
    """

    def __init__(self, connection: GangConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # guards what follows
        self._waiting: deque[tuple[CallFuture, Body]] = deque()
        self._threads = 0

    def call(self, body: Body) -> CallFuture:
        """Start a routine call."""
        future = CallFuture()
        with self._lock:
            self._waiting.append((future, body))
            more = self._threads < THREADS
            self._threads += more
        if more:
            threading.Thread(target=self._serve, name="alchemist-calls", daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                future, body = self._waiting.popleft()
            self._run(future, body)

    def _run(self, future: CallFuture, body: Body) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            reply = self._connection.request(body)
            future.set_result(results_of(reply, self._connection.handle))
        except BaseException as error:
            future.set_exception(error)
