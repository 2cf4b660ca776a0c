"""Gangs through a gateway: a `session.owner.SessionGangs`, and the connections to one gang.

Also `.remote` calls as futures.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.attached import registry
from alchemist_ray.attached.address import GangAddress, OnGang, this_process
from alchemist_ray.attached.connection import GangConnection, Transport
from alchemist_ray.attached.control_channel import OnFrame, SocketChannel
from alchemist_ray.attached.info import GangInfo
from alchemist_ray.attached.libraries import results_of
from alchemist_ray.attached.options import AttachOptions, ConnectionOptions, GangOptions, Workers
from alchemist_ray.attached.registry import ADDRESS_VARIABLE
from alchemist_ray.errors import (
    AlchemistError,
    AuthError,
    SessionError,
    StaleHandleError,
    from_failure,
)
from alchemist_ray.gateway.node import GatewayNode
from alchemist_ray.gateway.protocol import DESCRIBED, RESUME_S, GatewayAddress
from alchemist_ray.gateway.secure_socket import connect
from mpi_workers.data.description import DataEndpoints, NodeAddress, NodeTimes, TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.failures import Failure
from mpi_workers.wire import frames
from mpi_workers.wire.frames import Body

TOKEN_VARIABLE = "ALCHEMIST_TOKEN"


class GatewayGangs:
    """See the module.

    Parameters
    ----------
    address : GatewayAddress or None
        None: `move` gives it.
    session : str
        Id of the session.
    options : GangOptions or AttachOptions
    """

    def __init__(
        self, address: GatewayAddress | None, session: str, options: GangOptions | AttachOptions
    ) -> None:
        self._address = address
        self._token = options.token
        self._session = session
        self._shown = options
        # A session that is attached starts no gang.
        self._options = options if isinstance(options, GangOptions) else GangOptions()
        self._gang = ""  # that this session has started
        self.detached = self._options.detached
        self.start_timeout_s = self._options.start_timeout_s

    def move(self, address: str, port: int, *, in_use: bool) -> None:
        if in_use:
            raise SessionError("the session has workers: yield_workers() first")
        host = f"[{address}]" if ":" in address else address
        moved = GatewayAddress.parse(f"alchemist://{host}:{port}")
        ask(moved, self._token, {"op": "list_gangs"})
        self._address = moved

    def start(self, num_workers: Workers, env: Mapping[str, str] | None = None) -> GangConnection:
        process = uuid.uuid4().hex
        described = self._ask(
            "start_gang",
            workers=num_workers if isinstance(num_workers, int) else list(num_workers),
            session=self._session,
            process=process,
            options=self._options.with_env(env).for_gateway(),
        )
        self._gang = described["gang"]
        return self.connect(described, process)

    def connect(self, described: Body, process: str | None = None) -> GangConnection:
        """This process's connection to a gang that the gateway has described.

        Raises
        ------
        AuthError
            If another session of this process is connected to it with another token.
        """
        gateway = _known(self._address)
        connection = registry.join(
            address_of(gateway, described),
            lambda: connection_to(gateway, self._token, described, process, self._shown),
        )
        if connection.transport.token != _checked(self._token):
            registry.leave(connection)
            raise AuthError(
                f"this process is connected to gang {described['gang']} with another token, whose "
                "rights this session would have: close that session first, or use a process for "
                "each user"
            )
        return connection

    def _ask(self, op: str, **fields: Any) -> Body:
        return ask(_known(self._address), self._token, {"op": op, **fields})

    def resize(self, connection: GangConnection, num_workers: int) -> None:
        gang = connection.address.gang
        try:
            self._ask("resize_gang", gang=gang, workers=num_workers)
        except BaseException as error:
            if not isinstance(error, AlchemistError):  # Ctrl-C, or another signal's handler raised
                self._ask("stop_resize", gang=gang)
            raise

    def end(self, *, running: bool) -> bool:
        if running and self._gang:
            with contextlib.suppress(AlchemistError):  # it has ended
                self._ask("end_gang", gang=self._gang)
        self._gang = ""
        return True

    def kill(self, why: str) -> None:
        with contextlib.suppress(AlchemistError):
            self._ask("end_gang", gang=self._gang, at_once=True, why=why)

    def close(self, *, reusable: bool) -> None:
        """The gateway ends what is left, when this process's connection is gone."""

    def serve(self, **options: Any) -> Any:
        raise SessionError(
            "a session that uses a gateway cannot start one: call serve() in the Ray cluster"
        )


def ask(address: GatewayAddress, token: str | None, body: Body) -> Body:
    """Ask a gateway for something that is not about one gang.

    Raises
    ------
    AuthError
        If it refuses the token.
    SessionError
        If it cannot be reached.
    AlchemistError
        The gateway's answer.
    """
    fields = {"role": "session", "where": this_process()}
    try:
        connection, _ = connect(address, _checked(token), fields)
    except Failure as failure:
        raise from_failure(failure) from None
    except (OSError, frames.WireError) as error:
        advice = "`alchemist gateway` starts one"
        if not (address.tls or isinstance(error, ConnectionRefusedError)):
            advice = "a gateway with TLS does not answer to ?tls=off: leave it out"
        raise SessionError(f"no gateway answers at {address}: {error}. {advice}") from None
    with connection:
        return SocketChannel(connection, str(address)).request(body)


def _checked(token: str | None) -> str:
    found = token or os.environ.get(TOKEN_VARIABLE, "")
    if not found:
        raise AuthError(
            f"a gateway requires a token: give token=... or set {TOKEN_VARIABLE}. `alchemist token "
            "create USER` on the cluster makes one"
        )
    return found


def connection_to(
    gateway: GatewayAddress,
    token: str | None,
    described: Body,
    process: str | None = None,
    options: ConnectionOptions | None = None,
) -> GangConnection:
    """A connection of this process to a gang that the gateway has described."""
    return GangConnection(
        address_of(gateway, described),
        Handle,
        transport=GatewayTransport(gateway, _checked(token), described["gang"]),
        process=process,
        options=options,
    )


def _gateway(address: str | None) -> GatewayAddress | None:
    text = os.environ.get(ADDRESS_VARIABLE, "") if address is None else address
    return GatewayAddress.parse(text) if text else None


def _known(found: GatewayAddress | None) -> GatewayAddress:
    if found is None:
        raise SessionError(
            "Ray is not installed here, and no gateway is known: give "
            f"address='alchemist://host:port', set {ADDRESS_VARIABLE}, or call "
            "connect_to_alchemist(host, port)"
        )
    return found


# --- one gang ---


class GatewayTransport(Transport):
    """The connections of this process to one gang, through a gateway.

    Parameters
    ----------
    gateway : GatewayAddress
    token : str
    gang : str
        Id of the gang.
    """

    resume_s = RESUME_S

    def __init__(self, gateway: GatewayAddress, token: str, gang: str) -> None:
        self._gateway = gateway
        self.token = token
        self._gang = gang
        self._process = ""

    def open_channel(
        self, address: GangAddress, hello: Body, on_frame: OnFrame
    ) -> SocketChannel | None:
        self._process = hello["process"]
        fields = {**self._fields("client"), "where": hello["where"]}
        try:
            connection, _ = connect(self._gateway, self.token, fields)
        except (OSError, frames.WireError):
            return None
        except Failure as failure:
            raise from_failure(failure) from None
        return SocketChannel(connection, str(self._gateway), on_frame)

    def open_nodes(self, address: GangAddress, watch: Callable[[], object]) -> NodeConnections:
        fields = partial(self._fields, "data")
        return NodeConnections(
            DataEndpoints("", (NodeAddress(0, 1, address.addresses),)),
            watch=watch,
            connection_type=lambda node, _: GatewayNode(self._gateway, self.token, fields),
        )

    def copy_matrix(
        self, source: str, read: TransferTarget, written: TransferTarget, name: str
    ) -> dict[int, NodeTimes]:
        matrices = [[each.matrix, str(each.dtype)] for each in (read, written)]
        body = {"op": "copy_matrix", "source": source, "gang": self._gang, "matrices": matrices}
        told = ask(self._gateway, self.token, {**body, "name": name})
        return {node: NodeTimes(node, *its) for node, *its in told["times"]}

    def start_call(self, connection: GangConnection, body: Body) -> CallFuture:
        """The results as a future."""
        return connection.part(GatewayCalls).call(body)

    def _fields(self, role: str) -> Body:
        return {"role": role, "gang": self._gang, "process": self._process}


def address_of(gateway: GatewayAddress, described: Body) -> GangAddress:
    """The address of a gang as the gateway describes it: all its ranks are behind one node."""
    try:
        place = (str(gateway),)
        node = NodeAddress(0, int(described["size"]), place)
        known = {name: described[name] for name in (*DESCRIBED, "lease_grace_s")}
        return GangAddress(token="", addresses=place, nodes=(node,), **known)
    except (KeyError, TypeError, ValueError) as error:
        raise SessionError(
            f"{gateway} sent a gang description that this version cannot read: {error}"
        ) from None


MOST_THREADS = 32  # calls that wait at the same time; the gang runs one after the other anyway


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
            more = self._threads < MOST_THREADS
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
            if future.set_running_or_notify_cancel():
                try:
                    reply = self._connection.request(body)
                    future.set_result(results_of(reply, self._connection.handle))
                except BaseException as error:
                    future.set_exception(error)


# --- what `attached.registry.access` promises ---


def open_gangs(session: str, options: GangOptions) -> GatewayGangs:
    """The gangs of a session. Raises `ValueError` for options that a gateway does not take."""
    options.for_gateway()
    gateway = _gateway(options.address)
    if gateway is not None:
        _checked(options.token)
        if options.address is not None and options.num_workers is None:
            ask(gateway, options.token, {"op": "list_gangs"})  # else the start of the gang tells
    return GatewayGangs(gateway, session, options)


def attach(options: AttachOptions) -> tuple[GatewayGangs, GangConnection]:
    """A gang of another session, and a connection to it; see `AlchemistSession.attach`."""
    gateway = _known(_gateway(options.address))
    body = {"op": "attach_gang", "name": options.name, "timeout_s": float(options.timeout_s)}
    described = ask(gateway, options.token, body)
    gangs = GatewayGangs(gateway, described["session"], options)
    return gangs, gangs.connect(described)


def list_gangs(*, address: str | None, token: str | None) -> list[GangInfo]:
    """See `AlchemistSession.list`."""
    told = ask(_known(_gateway(address)), token, {"op": "list_gangs"})
    return [GangInfo.of(entry) for entry in told["gangs"]]


def stop_gang(name: str, *, address: str | None, token: str | None) -> None:
    """See `AlchemistSession.stop_gang`."""
    ask(_known(_gateway(address)), token, {"op": "stop_gang", "name": name})


def connect_to_gang_of(ref: OnGang) -> GangConnection | None:
    """A connection to the gang of what came from another process; None if it has ended."""
    gateway = _gateway(None)
    if gateway is None or not os.environ.get(TOKEN_VARIABLE):
        raise StaleHandleError(
            f"no session of this process is connected to the gang of {ref.name}: if that gang has "
            "ended, make or load it again; if it came from another process, attach to its gang "
            f"first, or set {ADDRESS_VARIABLE} and {TOKEN_VARIABLE}"
        )
    try:
        described = ask(gateway, None, {"op": "find_gang", "gang": ref.gang})
        if described["session"] == ref.session:
            return connection_to(gateway, None, described)
    except AuthError:
        raise
    except AlchemistError:
        pass
    return None
