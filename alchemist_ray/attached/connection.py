"""GangConnection: an attached process's end of its connection to a gang.

Commands go through the control channel, data through connections to the nodes. Needs no Ray.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any, TypeVar, cast

from alchemist_ray.attached.address import GangAddress, this_process
from alchemist_ray.attached.control_channel import (
    MANAGER_GONE,
    OPENING_S,
    OnFrame,
    OnProgress,
    SocketChannel,
)
from alchemist_ray.attached.leases import MatrixLease, MatrixLeases
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.options import ConnectionOptions
from alchemist_ray.errors import (
    AlchemistError,
    AuthError,
    GroupFailedError,
    MatrixNotFoundError,
    SessionError,
    StaleHandleError,
    TransferError,
    from_failure,
)
from mpi_workers.data.description import DataEndpoints, NodeTimes, TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Grid, default_grid
from mpi_workers.protocol.commands import COMMANDS, Turn, matrices_of
from mpi_workers.protocol.libraries import ARRAYS
from mpi_workers.wire import sockets
from mpi_workers.wire.blocking import connect
from mpi_workers.wire.frames import Body, WireError

T = TypeVar("T")
R = TypeVar("R", bound=MatrixRef)

FIRST_S = 2.0  # for a loss of ranks that its GroupManager has not noticed yet
POLL_INTERVAL_S = 0.05
NODE_FAILED = "a node could not send"  # cause of a TransferError whose gang is known to live
READS = 3  # of a matrix that is changed meanwhile
COPY_LAYOUTS = ("VC_STAR", "VR_STAR")  # to another layout than its own a matrix is copied
TOUCHES = 10  # signs of life within the idle timeout of a gang


class Transport:
    """How a process reaches one gang: here only through the sockets of the gang itself.

    Attributes
    ----------
    resume_s : float
        How long a call tries to restore a control channel that was lost.
    token : str
        The token whose rights the process has; empty without a gateway.
    manager : GangHandle or None
        The gang in its GroupManager, where this process is in its Ray cluster.
    """

    resume_s = 10.0
    token = ""
    manager: Any = None

    def open_channel(
        self, address: GangAddress, hello: Body, on_frame: OnFrame
    ) -> SocketChannel | None:
        """A channel to the dispatcher; None if it cannot be reached. See `SocketChannel`.

        `hello`: what the dispatcher is told of this process. Raises `AuthError` if it refuses.
        """
        for place in sockets.reachable_addresses(address.addresses):
            try:
                connection, _ = connect(
                    place, address.token, hello, timeout_s=OPENING_S, take_fds=False
                )
            except (OSError, WireError):
                continue
            except Failure as failure:
                raise from_failure(failure) from None
            return SocketChannel(connection, place, on_frame)
        return None

    def open_nodes(self, address: GangAddress, watch: Callable[[], object]) -> NodeConnections:
        """The connections for data; see `NodeConnections` for `watch`."""
        return NodeConnections(DataEndpoints(address.token, address.nodes), watch=watch)

    def open_rank_channel(self, connection: GangConnection, serve: Any, timeout_s: float) -> Any:
        """A `rank_channel.RankChannel` to all ranks; None: they cannot connect to this process."""
        return None

    def address_now(self) -> GangAddress | None:
        """Where the gang is now, if another process than the gang's can tell.

        Raises
        ------
        AlchemistError
            Why it is nowhere.
        TimeoutError
            If it is still being started again.
        """
        return None

    def keep_source(self, epoch: int, matrix: int, data: Any) -> None:
        """Have the GroupManager, if there is a `manager`, keep data to send again after a loss."""

    def copy_matrix(
        self, source: str, read: TransferTarget, written: TransferTarget, name: str
    ) -> dict[int, NodeTimes]:
        """Have a matrix of gang `source` copied into one of this gang, by a gateway."""
        raise NotImplementedError

    def start_call(self, connection: GangConnection, body: Body) -> Any:
        """Start a routine call; what `.remote` returns. Raises `SessionError` without Ray."""
        raise SessionError(
            "this process is not in the gang's Ray cluster, which .remote() needs: call the "
            "routine directly"
        )


class GangConnection:
    """This process's view of a gang. Thread-safe, also in a forked child.

    Parameters
    ----------
    address : GangAddress
        How to reach the gang.
    handle_type : type
        Made of the matrices that the gang describes: `alchemist_ray.Handle`.
    transport : Transport, optional
        How this process reaches it. Default: through the sockets of the gang itself.
    process : str, optional
        Id under which this process holds its leases. Default: a new one.
    owner : bool
        Whether the gang ends when this process is gone.
    options : ConnectionOptions, optional
        What this process shows, and in which steps it moves data.

    Attributes
    ----------
    process : str
        The id under which this process holds its leases.
    closed : bool
        Whether `close` was called.
    channels : dict of str to (GangConnection, int)
        Of its calls, by name: to which gang, and how many fields may wait to be taken.

    Raises
    ------
    GroupFailedError
        If the gang cannot be reached.
    """

    def __init__(
        self,
        address: GangAddress,
        handle_type: type[MatrixRef],
        *,
        transport: Transport | None = None,
        process: str | None = None,
        owner: bool = False,
        options: ConnectionOptions | None = None,
    ) -> None:
        self._at(address)
        self.options = options or ConnectionOptions()
        self.owner = owner
        self.handle_type = handle_type
        self.transport = transport or Transport()
        self._touched = time.monotonic()
        self._sessions = 0
        self.channels: dict[str, tuple[GangConnection, int]] = {}
        self.closed = False
        self._begin(process)
        # What ends a private gang when nothing refers to it: the session, handles and libraries do.
        self.holder: Callable[[], object] = lambda: None
        _connections.add(self)

    def _begin(self, process: str | None = None) -> None:
        """Open what belongs to one process: channel, connections to nodes, leases."""
        self.process = process or uuid.uuid4().hex
        # Carries out what is recorded (`arrays.recording`) before commands that could tell.
        self.before_commands: Callable[[], None] = lambda: None
        self._lock, self._making = threading.RLock(), threading.RLock()
        self._parts: dict[Any, Any] = {}
        self._channel: SocketChannel | None = None
        self.nodes = self.transport.open_nodes(self.address, self.ping)
        self.leases = MatrixLeases(self._lock, self._tell_lease, shared=self.address.shared)
        if self.owner or not self._forked:
            self._open_channel()

    _forked = False

    def _at(self, address: GangAddress) -> None:
        self.address = address
        self.grid: Grid = default_grid(address.size)
        self.endpoints = DataEndpoints(address.token, address.nodes)

    def after_fork(self) -> None:
        """Forget the parent's sockets and threads in a forked child.

        The parent goes on to own the gang.
        """
        self.owner = False
        self._forked = True
        self.leases.abandon()
        self._begin()

    def _open_channel(self) -> SocketChannel:
        with self._lock:
            if self._channel is None:
                unreachable = GroupFailedError(
                    f"no address of gang {self.address.gang} can be reached from process "
                    f"{os.getpid()}: {', '.join(self.address.addresses)}"
                )
                self._channel = self._dial(FIRST_S if self.transport.manager else 0.0, unreachable)
            return self._channel

    def _dial(self, limit_s: float, error: GroupFailedError) -> SocketChannel:
        """Connect, also at another address if the gang is being started again. Raises `error`."""
        deadline = time.monotonic() + limit_s
        while (channel := self._dialled()) is None:
            now = self._address_now(error)
            if now.epoch > self.address.epoch:
                self.move_to(now)
            elif time.monotonic() >= deadline:
                raise error
            else:
                time.sleep(POLL_INTERVAL_S)
        return channel

    def _dialled(self) -> SocketChannel | None:
        hello = {
            "role": "client",
            "owner": self.owner,
            "session": self._sessions > 0,
            "process": self.process,
            "where": this_process(),
        }
        return self.transport.open_channel(self.address, hello, self._on_frame)

    def _address_now(self, error: GroupFailedError) -> GangAddress:
        """The GroupManager's answer. Raises `error` if the GroupManager has ended, too."""
        try:
            return self.transport.address_now() or self.address
        except AlchemistError as ended:
            if ended.facts.get("cause") != MANAGER_GONE:
                raise  # it says what happened
            raise error from None
        except TimeoutError:  # the gang is still being started again
            return self.address

    def _on_frame(self, body: Body, op: str) -> None:
        """Called by the thread that reads the control channel, with each frame."""
        command = COMMANDS.get(op)
        if "moved" in body:
            self.on_move(body["moved"])
        elif "result" in body and (command is None or command.turn in (Turn.QUEUED, Turn.STORE)):
            self._lease_results(body["result"])

    def _lease_results(self, value: Any) -> None:
        """Lease the matrices in an answer, before the thread that waits for it makes handles.

        Otherwise a `resume` of another thread would not name them, and the gang would free them.
        Each lease lies in the description of its matrix, and ends with it.
        """
        inside = value.values() if isinstance(value, dict) else value
        for item in inside:
            if isinstance(item, dict) or (isinstance(item, list) and isinstance(value, dict)):
                self._lease_results(item)
        if isinstance(value, dict) and isinstance(value.get("matrix"), int):
            kept = bool(value.get("pinned"))
            value["lease"] = self.leases.lease(value["matrix"], kept=kept)
            self.leases.share(value.get("aliases", ()))

    def on_move(self, fields: Body) -> None:
        """The dispatcher has told that the gang has other ranks now: started again, or resized."""
        with self._lock:
            if fields["epoch"] > self.address.epoch:
                self.move_to(self.address.moved(fields))

    def move_to(self, address: GangAddress) -> None:
        """Use the next incarnation of the gang, which has carried over the matrices."""
        with self._lock:
            self._at(address)
            old, self.nodes = self.nodes, self.transport.open_nodes(self.address, self.ping)
        old.close()

    @property
    def over(self) -> bool:
        """Whether the gang is known to have ended, and no session uses the connection."""
        lost = self.known_loss()
        resumable = lost and lost.facts.get("cause") == MANAGER_GONE and self.address.lease_grace_s
        return self._sessions <= 0 and lost is not None and not resumable

    def known_loss(self) -> AlchemistError | None:
        """Why the gang cannot be reached, if that is known without asking it."""
        channel = self._channel
        return None if channel is None else channel.known_loss()

    def begin_session(self) -> None:
        """One more session of this process uses the connection."""
        with self._lock:
            self._sessions += 1
        self.tell({"op": "session"})

    def end_session(self) -> bool:
        """A session no longer uses it; whether it was the last one."""
        with self._lock:
            self._sessions -= 1
            return self._sessions <= 0

    def close(self) -> None:
        """Close every connection of this process to the gang."""
        self.closed = True
        self.leases.close()
        self.nodes.close()
        if self._channel is not None:
            self._channel.close()

    def part(self, kind: Callable[[GangConnection], T]) -> T:
        """The one object of this kind that belongs to the connection; made at the first call."""
        with self._making:  # not `_lock`: the thread that reads may need it
            if kind not in self._parts:
                self._parts[kind] = kind(self)
            return cast("T", self._parts[kind])

    def start_call(self, body: Body) -> Any:
        """Start a routine call; see `Transport.start_call`."""
        self.before_commands()
        self.leases.share(_changed(body))
        return self.transport.start_call(self, self._coupled(body))

    def _coupled(self, body: Body) -> Body:
        """A command, with the channels that its call may use."""
        if self.channels and body["op"] == "submit":
            return {**body, "command": self._coupled(body["command"])}
        if not self.channels or body["op"] not in ("call", "run"):
            return body
        channels = {
            name: channel_between(self, other, name, fields)
            for name, (other, fields) in self.channels.items()
        }
        return {**body, "channels": channels}

    # --- commands ---

    def request(self, body: Body, on_progress: OnProgress | None = None) -> Body:
        """Run a command on the gang. Raises `AlchemistError`; Ctrl-C cancels the command."""
        if self.closed:
            raise SessionError(
                f"gang {self.address.incarnation} has ended, with its libraries and matrices: "
                "load_library(...) again in the session's new gang"
            )
        if _sees_arrays(body):
            self.before_commands()
        body = self._coupled(body if self.options.output else {**body, "output": False})
        try:
            self.leases.sweep()
            with self.leases.changing(_changed(body)):
                return self._exchange(body, on_progress)
        except GroupFailedError:
            self.nodes.trim()  # a mapping would keep the memory of a rank that is gone
            raise

    def _exchange(self, body: Body, on_progress: OnProgress | None) -> Body:
        """Send a command and wait; a connection that is lost meanwhile is restored if possible."""
        channel = self._open_channel()
        if self.address.lease_grace_s:
            lost = channel.known_loss()
            if isinstance(lost, GroupFailedError) and lost.facts.get("cause") == MANAGER_GONE:
                self._resume(channel, lost)  # the command has not been sent
                channel = self._open_channel()
        try:
            return channel.request(body, on_progress)
        except GroupFailedError as error:
            if error.facts.get("cause") != MANAGER_GONE or not self.address.lease_grace_s:
                raise
            self._resume(channel, error)
        if COMMANDS[body["op"]].idempotent:
            return self._open_channel().request(body, on_progress)
        raise TransferError(
            f"the connection to gang {self.address.gang} was lost during {body['op']!r} and is "
            "restored; the matrices stay. The call was cancelled, unless it had just completed: "
            "check what it changes before you repeat it"
        )

    def _resume(self, lost: SocketChannel, error: GroupFailedError) -> None:
        """Connect again under the same id, within the grace. Raises `error` if that fails."""
        lost.settle()  # then answers that have arrived have their leases
        with self._lock:  # also of the leases: none is released between the two messages
            if self._channel is not lost:
                return  # another thread has done it
            # A link cannot break on one node.
            ended = lost.same_node and self.transport.manager is None
            channel = self._dial(0.0 if ended else self.transport.resume_s, error)
            # First of all: the gang frees matrices of this process that are not named here.
            channel.tell({"op": "resume", "matrices": self.leases.live()})
            self._channel = channel

    def ping(self, *, wait: bool = False) -> None:
        """Raise what ended the gang, if it has ended.

        `wait`: first wait until the gang is there again, if it is being started again.
        """
        self.request({"op": "ping", "wait": wait})

    def tell(self, body: Body) -> None:
        """Send a command and do not wait for its answer."""
        if not self.closed:
            self._open_channel().tell(body)

    def cancel(self) -> None:
        """Cancel the commands that other threads of this process wait for."""
        if self._channel is not None:
            self._channel.cancel()

    def _tell_lease(self, op: str, matrices: list[int]) -> None:
        if op == "pin":  # others may change them now
            self.before_commands()
        self.tell({"op": op, "matrices": matrices})

    # --- matrices ---

    def handle(self, record: Body) -> Any:
        """The handle of a matrix as the dispatcher describes it, with a lease on the matrix."""
        lease = self.leases.lease(record["matrix"], kept=bool(record.get("pinned")))
        lease.holder = self.holder()
        if "elements" in record:
            lease.remember(record["elements"], lease.version)
        return self.handle_type.from_record(record, self.address, lease)

    def lease(self, matrix: int) -> MatrixLease:
        """The lease of this process on a matrix that another process described."""
        with self._lock:  # not between the two halves of a `sweep`
            lease = self.leases.lease(matrix)
            self.tell({"op": "hold", "matrices": [matrix]})
            return lease

    def check(self, ref: R) -> R:
        """The reference, if it is of this incarnation of this gang. Raises `MatrixError`."""
        if ref.session != self.address.session:
            raise MatrixNotFoundError(
                f"{ref.name} is in gang {ref.gang}, and this is for gang {self.address.gang}: "
                f"session.send_matrix({ref.name}), of the session of gang {self.address.gang}, "
                "copies it there"
            )
        address = self.address
        if ref.gang != address.gang or not address.first_epoch <= ref.epoch <= address.epoch:
            if self.closed and (ref.gang != address.gang or ref.epoch > address.epoch):
                return ref  # of the session's next gang: `request` says that this one has ended
            raise StaleHandleError(
                f"{ref.name} belonged to an earlier gang of session {ref.session}, whose "
                "memory was freed: send or compute it again"
            )
        if ref.id in address.stale:
            raise StaleHandleError(address.stale[ref.id])
        self._touch()
        return ref

    def read(self, ref: MatrixRef, transfer: Callable[[MatrixRef], T]) -> T:
        """Run a transfer from the ranks, again if a command has changed the matrix meanwhile.

        A matrix that changes faster than it can be read is copied in a turn among the commands.
        """
        with self._used():
            version = ref.version
            if version is not None:
                result = transfer(ref)
                if ref.version == version:
                    return result
            before = self._version(ref)
            for _ in range(READS):
                result = transfer(ref)
                after = self._version(ref)
                if after == before:
                    return result
                before = after
            layout = next(name for name in COPY_LAYOUTS if name != ref.layout)
            copy = {"op": "redistribute", "source": ref.id, "layout": layout}
            try:
                return transfer(self.handle(self.request(copy)))
            except AuthError:  # a token that only reads
                raise TransferError(
                    f"{ref.name} changes faster than it can be fetched: fetch it between the calls "
                    "that change it"
                ) from None

    def _version(self, ref: MatrixRef) -> int:
        """The version of a matrix on the gang; waits while a command may change it."""
        return int(self.request({"op": "version", "matrix": ref.id})["version"])

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """While data come from the ranks: a gang with a time limit is told that it is used."""
        limit_s = self.address.idle_timeout_s
        if limit_s is None:
            yield
            return
        over = threading.Event()

        def touch() -> None:
            while not over.wait(limit_s / TOUCHES):
                self.tell({"op": "ping"})

        threading.Thread(target=touch, name="alchemist-in-use", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _touch(self) -> None:
        """Tell a gang with a time limit that it is used: data goes directly to its ranks."""
        limit_s = self.address.idle_timeout_s
        if limit_s is not None and time.monotonic() - self._touched > limit_s / TOUCHES:
            self._touched = time.monotonic()
            self.tell({"op": "ping"})

    def argument(self, ref: MatrixRef) -> int:
        """The id of a matrix for a call. Raises as `check`."""
        return self.check(ref).id

    def free(self, ref: MatrixRef) -> None:
        """Free a matrix now, whatever handles of it there are."""
        self.check(ref)
        self.request({"op": "free", "matrices": [ref.id]})
        ref.forget_lease()


WRITE_ARRAYS = frozenset({"assign", "assign_elements", "put_elements", "update"})


def channel_between(ours: GangConnection, theirs: GangConnection, name: str, fields: int) -> Body:
    """The entry of a channel in the field ``channels`` of a call; a gateway adds the addresses."""
    of, to = ours.address, theirs.address
    about: Body = {"other": to.gang, "fields": fields}
    if ours.transport.token:
        return about
    first, last = sorted((of.gang, to.gang))
    about |= {"key": f"{name} of {first} and {last}", "waits": of.gang == first}
    for side, its in (("ours", of), ("theirs", to)):
        about[side] = {"token": its.token, "nodes": [list(astuple(node)) for node in its.nodes]}
    return about


def _sees_arrays(body: Body) -> bool:
    """Whether a command may change an array, or list arrays."""
    if body["op"] == "call" and body["library"] == ARRAYS:
        return body["routine"] in WRITE_ARRAYS
    return COMMANDS[body["op"]].sees_arrays


def _changed(body: Body) -> list[int]:
    """The matrices that a command may change, as far as this process knows."""
    match body:
        case {"op": "call", "library": library, "routine": routine} if library == ARRAYS:
            return matrices_of(body) if routine in WRITE_ARRAYS else []
        case {"op": "call" | "run"}:
            return matrices_of(body)
    return []


_connections: weakref.WeakSet[GangConnection] = weakref.WeakSet()


def _before_fork() -> None:
    for connection in list(_connections):
        connection.leases.shared = True  # the child may change the matrices


def _after_fork_in_child() -> None:
    for connection in list(_connections):
        if not connection.closed:
            connection.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
