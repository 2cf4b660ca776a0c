"""The methods of `AlchemistSession` that start gangs, attach to them, resize and end them.

How gangs are started and reached is the matter of `SessionGangs`: in the Ray cluster of this
process (`ray_access.ray_gangs`), or through a gateway (`gateway.client`), where Ray is not
installed.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import logging
import os
import threading
import uuid
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

from alchemist_ray.arguments import checked_address, checked_env, positive_int
from alchemist_ray.attached import registry
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.info import (
    CallInfo,
    GangInfo,
    WorkerInfo,
    calls_of,
    workers_of,
    workers_table,
)
from alchemist_ray.attached.options import (
    AttachOptions,
    ConnectionOptions,
    GangOptions,
    Workers,
    checked_workers,
    with_options,
)
from alchemist_ray.attached.progress import narrated, say
from alchemist_ray.cluster import published
from alchemist_ray.errors import AlchemistError, GroupError, SessionError
from alchemist_ray.plural import counted
from mpi_workers.deadlines import GANG_END_S

MANAGER_TIMEOUT_S = 30.0  # for a GroupManager to start, and to clean up after a failed launch

log = logging.getLogger(__name__)


class SessionGangs(Protocol):
    """Starts, reaches and ends the gangs of one session.

    Attributes
    ----------
    detached : bool
        Whether its gang outlives the session.
    start_timeout_s : float
        Time limit for the start of a gang.
    """

    detached: bool
    start_timeout_s: float

    def move(self, address: str, port: int, *, in_use: bool) -> None:
        """Use the gangs of another cluster. Raises `SessionError` if that is not possible."""

    def start(self, num_workers: Workers, env: Mapping[str, str] | None = None) -> GangConnection:
        """Start a gang and connect; `env`: more variables of its ranks than the options have.

        Raises `ResourceError`, `LaunchError`, `GroupError`.
        """

    def resize(self, connection: GangConnection, num_workers: int) -> None:
        """Move a gang to this many ranks. Raises `AlchemistError`; it goes on as it was then."""

    def end(self, *, running: bool) -> bool:
        """End the gang if one runs; whether what managed it can be used again."""

    def kill(self, why: str) -> None:
        """End the gang at once, also if its ranks hang."""

    def close(self, *, reusable: bool) -> None:
        """The session is closed. Not `reusable`: a start may still be under way."""

    def serve(self, **options: Any) -> Any:
        """Start a gateway. Raises `SessionError` where none can run."""


class HeldGang:
    """The gang of a session. When nothing refers to this object any more, the gang is given back.

    The session refers to it, and so do its handles and libraries.

    Attributes
    ----------
    gangs : SessionGangs
        Set when the session has joined a cluster.
    connection : GangConnection or None
        While there are workers.
    attached : bool
        Whether another session has started the gang.
    libraries : dict of str to Library
        Those that the session has loaded on it.
    """

    gangs: SessionGangs

    def __init__(self) -> None:
        self.connection: GangConnection | None = None
        self.attached = False
        self.libraries: dict[str, Any] = {}
        self._pid = os.getpid()
        _held.add(self)

    @property
    def detaches(self) -> bool:
        """Whether the gang outlives the session."""
        return self.attached or self.gangs.detached

    def use(self, connection: GangConnection | None) -> None:
        """The session has these workers now."""
        self.connection = connection
        self.libraries = {}
        if connection is not None:
            connection.holder = weakref.ref(self)

    def drop_client(self) -> None:
        """Leave the gang."""
        connection, self.connection = self.connection, None
        if connection is not None:
            leave = registry.leave if self.detaches else registry.detach
            leave(connection)

    def end(self) -> bool:
        """End the gang, if there is one; whether its manager is fit for another."""
        try:
            return self.gangs.end(running=self.connection is not None)
        finally:
            self.drop_client()

    def close(self, changing: threading.RLock) -> None:
        """Leave the gang, and end it unless it is detached. `changing`: see `GangOwner`."""
        reusable = False
        try:
            if changing.acquire(timeout=GANG_END_S):
                try:
                    if self.detaches:
                        self.drop_client()
                    reusable = self.end()
                finally:
                    changing.release()
        finally:
            self.gangs.close(reusable=reusable)  # not after Ctrl-C, or during another's start

    def __del__(self) -> None:
        connection = self.connection
        if connection is None or self._pid != os.getpid():
            return
        name = connection.address.gang
        text = f"the session of gang {name} was not closed: use als.stop(), or with"
        warnings.warn(text, ResourceWarning, stacklevel=2)
        left = HeldGang()  # this one is gone
        left.gangs, left.connection, left.attached = self.gangs, connection, self.attached
        # In a thread: garbage may be collected in the middle of a command.
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and the gang with it
            threading.Thread(target=left.close, args=(threading.RLock(),), daemon=True).start()


class GangOwner:
    """Owns a gang until it is closed. `AlchemistSession` adds the methods that use the gang."""

    @with_options(GangOptions, "AlchemistSession")
    def __init__(self, options: GangOptions) -> None:
        self._begin(options)
        gangs = registry.access(options.address, options.token)
        self._held.gangs = gangs.open_gangs(self.id, options)
        _sessions.add(self)
        if options.num_workers is not None:
            try:
                self.request_workers(options.num_workers)
            except BaseException:
                self.close()
                raise

    def _begin(self, options: ConnectionOptions) -> None:
        self._options = options
        self.id = f"s{uuid.uuid4().hex[:10]}"
        self._held = HeldGang()
        self._closed = False
        self._changing = threading.RLock()  # one thread at a time starts or ends the gang
        self._pid = os.getpid()

    def _attach_to(self, gangs: SessionGangs, connection: GangConnection) -> None:
        """Use a gang of another session."""
        self.id = connection.address.session
        self._held.gangs = gangs
        self._held.attached = True
        self._held.use(connection)
        connection.options = self._options
        _sessions.add(self)

    def connect_to_alchemist(self, address: str, port: int) -> None:
        """Join the Ray cluster whose head listens at ``address:port`` (its GCS port).

        Raises
        ------
        SessionError
            If this process has joined another cluster and cannot leave it, or if no cluster that
            fits this process is there.
        AuthError
            If that cluster requires a token that this process does not have.
        """
        self._check_open()
        checked_address(address, port)
        host = "127.0.0.1" if address == "0.0.0.0" else address
        self._gangs.move(host, port, in_use=self._connection is not None)

    connect = connect_to_alchemist  # in the paper's listing of an environment (2019, IV)

    # --- workers ---

    def request_workers(
        self, num_workers: Workers, *, env: Mapping[str, str] | None = None
    ) -> list[WorkerInfo]:
        """Start a gang of MPI ranks and wait until it is ready.

        Parameters
        ----------
        num_workers : int or (int, int)
            Ranks; or the fewest and the most, of a gang that starts with the CPUs that are free
            and grows and shrinks with the cluster (``docs/resize.md``).
        env : dict of str to str, optional
            Environment variables of this gang's ranks, besides those of the session.

        Returns
        -------
        list of WorkerInfo
            One per rank.

        Raises
        ------
        ResourceError
            If the cluster does not have the CPUs; nothing was started.
        LaunchError
            If the ranks do not start in time; nothing is left of them.
        GroupError
            If the session already has workers, or the name of its gang is in use.
        SessionError
            If the session is attached to a gang of another session.

        Notes
        -----
        After the loss of a gang this starts the next one; handles of the lost gang are stale.
        """
        self._check_open()
        num_workers = checked_workers(num_workers)
        env = checked_env(env)
        with self._changing_workers():
            if self._connection is not None and self._alive():
                raise GroupError(
                    f"the session has {counted(self._connection.address.size, 'worker')} already: "
                    "yield_workers() first, or open another session"
                )
            if self._held.attached:
                raise SessionError(
                    "this session was attached to a gang of another session, which has ended: "
                    "start a gang with AlchemistSession(num_workers, ...)"
                )
            self._held.drop_client()
            self._held.use(self._gangs.start(num_workers, env))
            try:
                self._check_started()
            except BaseException:
                self._held.end()
                raise
            if self._closed:  # by another thread, which did not wait for this start
                self._held.drop_client()
                self._gangs.close(reusable=False)
            workers = self.list_workers()
            if self._options.verbose:
                say(workers_table(workers))
            return workers

    def _check_started(self) -> None:
        """Check what only a gang that is ready can tell."""

    @property
    def _gangs(self) -> SessionGangs:
        return self._held.gangs

    @property
    def _connection(self) -> GangConnection | None:
        return self._held.connection

    @property
    def _detaches(self) -> bool:
        return self._held.detaches

    def _check_own(self) -> None:
        self._check_open()
        if self._detaches and self._connection is not None:
            name = self._connection.address.gang
            raise SessionError(
                f"gang {name} may have other attached processes: detach() leaves it, and "
                f"AlchemistSession.stop_gang({name!r}) ends it"
            )

    def yield_workers(self) -> None:
        """End the gang and return its CPUs. Its matrices are freed; the session stays open.

        Raises `SessionError` for a detached gang, and in an attached session.
        """
        self._check_own()
        with self._changing_workers():
            self._held.end()

    def kill_workers(self, why: str = "its session ended it") -> None:
        """End the gang at once, also if its ranks hang; otherwise like `yield_workers`."""
        self._check_own()
        if self._connection is not None:
            self._gangs.kill(why)
        self._held.drop_client()

    def list_workers(self) -> list[WorkerInfo]:
        """The ranks of the gang: where each runs, and whether it is idle or busy."""
        self._check_open()
        if self._connection is None:
            return []
        return workers_of(self._connection)

    # --- the end ---

    def close(self) -> None:
        """End the session, and its gang unless that is detached. A second call does nothing."""
        if self._closed or self._pid != os.getpid():  # a forked child does not own the gang
            return
        self._closed = True
        _sessions.discard(self)
        self._held.close(self._changing)

    stop = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a session cannot be pickled: pass handles and libraries to other processes, or attach "
            "to a session that has a name (AlchemistSession.attach)"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "no workers"
        if self._connection is not None:
            address = self._connection.address
            state = f"{counted(address.size, 'worker')}, epoch {address.epoch}"
        return f"<AlchemistSession {self.id}: {state}>"

    # --- inside ---

    @contextlib.contextmanager
    def _changing_workers(self) -> Iterator[None]:
        """Start or end workers in this thread only. Raises `GroupError` if another one does not
        finish in the time that a start may take.
        """
        limit_s = self._gangs.start_timeout_s + MANAGER_TIMEOUT_S + GANG_END_S
        if not self._changing.acquire(timeout=limit_s):
            raise GroupError(
                "another thread has been starting or ending workers of this session for "
                f"{limit_s:.0f} s: let one thread call request_workers() and yield_workers()"
            )
        try:
            self._check_open()
            yield
        finally:
            self._changing.release()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("the session is closed: open another AlchemistSession()")

    @property
    def connection(self) -> GangConnection:
        """The connection to the gang, for clients. Raises `SessionError` if there is no gang."""
        self._check_open()
        if self._connection is None:
            raise SessionError("the session has no workers: request_workers(n) starts a gang")
        return self._connection

    @property
    def has_workers(self) -> bool:
        """Whether the session has a gang (which may have failed since)."""
        return self._connection is not None

    def _alive(self) -> bool:
        try:
            self.connection.ping(wait=True)
        except AlchemistError:
            return False
        return True


class SharedGangs(GangOwner):
    """Resizes gangs, attaches to those of other sessions, lists and ends them."""

    def resize(self, num_workers: int) -> builtins.list[WorkerInfo]:
        """Move the gang to another number of ranks, with its matrices and libraries.

        Handles stay valid. Commands of all processes run until the new ranks are ready, and wait
        while the matrices are moved.

        Parameters
        ----------
        num_workers : int
            More or fewer than now.

        Returns
        -------
        list of WorkerInfo
            One per rank.

        Raises
        ------
        ResourceError
            If the cluster does not have the CPUs, or a node not the memory for the matrices of
            both the old and the new ranks.
        LaunchError, TransferError
            If the new ranks do not start in time, or a node is lost.
        LibraryLoadError
            If a library cannot be loaded on the new ranks.
        GroupError
            If ranks are lost.

        Notes
        -----
        After an error, or Ctrl-C, the gang goes on as it was. States of libraries without
        `save_state` and `load_state` start empty (``docs/resize.md``). Several processes that
        resize a gang do it one after the other.
        """
        positive_int("num_workers", num_workers)
        connection = self.connection
        with narrated(self._options.verbose, f"Resize to {counted(int(num_workers), 'worker')}"):
            self._gangs.resize(connection, int(num_workers))
        return self.list_workers()

    @classmethod
    @with_options(AttachOptions, "AlchemistSession.attach")
    def attach(cls, options: AttachOptions) -> Self:
        """A session on a gang that another process has started, at the same time as others.

        Parameters
        ----------
        name : str
            Of a gang in the Ray cluster of this process (see `list`), or of one that another job
            of this user has published (`publish`).
        timeout_s : float
            Time limit if the gang is being started, in seconds.
        address, token, progress, output, verbose, buffer_bytes
            As for `AlchemistSession`.

        Returns
        -------
        AlchemistSession
            Its `close` or `stop`, and the end of ``with``, detach it. The gang's matrices are
            found by `matrix` and `list_matrices`, its libraries by `library`, its calls by
            `list_calls`.

        Raises
        ------
        SessionError
            If there is no such gang, with the names of those that there are; if it is being
            ended; if it runs another version of this package or of Python.
        GroupFailedError
            If it has failed, with the cause.

        Notes
        -----
        The gang runs the commands of all processes in turn. A matrix stays while any process has
        a handle of it. A process that loses its connection to a detached gang keeps its matrices
        for 60 s, and resumes the connection with its next command.
        """
        there = published.found(options)
        try:
            gangs, connection = registry.access(there.address, there.token).attach(there)
        except SessionError as error:
            if there is options:
                raise
            raise SessionError(
                f"another job has published gang {options.name}, and has perhaps ended, with its "
                "calls and matrices (AlchemistSession.restore reads a checkpoint). Remove "
                f"{published.path_of(options.name)} to look in this Ray cluster instead: {error}"
            ) from None
        session = cls.__new__(cls)
        session._begin(options)
        session._attach_to(gangs, connection)
        return session

    @classmethod
    def list(
        cls, *, address: str | None = None, token: str | None = None
    ) -> builtins.list[GangInfo]:
        """The gangs of this Ray cluster, private ones as well: state, owner, size, use.

        Raises `SessionError` if this process is in no Ray cluster and finds none.
        """
        found: builtins.list[GangInfo] = registry.access(address, token).list_gangs(
            address=address, token=token
        )
        return found

    @classmethod
    def stop_gang(cls, name: str, *, address: str | None = None, token: str | None = None) -> None:
        """End a gang, for all its attached processes. Its matrices are freed.

        Raises
        ------
        SessionError
            If there is no such gang, with the names of those that there are.

        Notes
        -----
        Returns when its processes have ended and its CPUs are free. Processes that wait for a
        call on it get a `SessionError`.
        """
        wanted = AttachOptions(name, address=address, token=token).name
        registry.access(address, token).stop_gang(wanted, address=address, token=token)

    def serve(self, **options: Any) -> Any:
        """Start a gateway for clients without Ray in this session's cluster, or find it.

        Parameters
        ----------
        **options
            ``host``, ``port``, ``tls``, ``certfile``, ``keyfile``, ``tokens``, ``audit``: see
            `alchemist_ray.gateway.server.actor.serve`.

        Returns
        -------
        GatewayInfo
            Its `address` is for ``AlchemistSession(address=...)``; `stop` ends it. It stays when
            this session is closed.

        Raises
        ------
        SessionError
            If it cannot listen, or this session uses a gateway itself.
        """
        self._check_open()
        return self._gangs.serve(**options)

    def publish(self) -> Path:
        """Have other jobs of this user find the gang: ``AlchemistSession.attach(name)``.

        Starts a gateway, if none runs, and writes its address and a token with all rights but
        ``admin`` to ``~/.alchemist/gangs/NAME.json``, which only this user can read.

        Returns
        -------
        Path
            The file; remove it when the gang ends.

        Raises
        ------
        SessionError
            As `serve`.
        """
        return Path(registry.gateway_actor().publish(self.connection.address.gang))

    def detach(self) -> None:
        """Leave the gang, which goes on; the session is closed.

        Raises
        ------
        SessionError
            If the gang is private: it ends with its session.
        """
        self._check_open()
        if not self._detaches:
            raise SessionError(
                "this session's gang is private and ends with it: detach() is for gangs with "
                "lifetime='detached'"
            )
        self.close()

    def cancel(self, *, everyone: bool = False) -> int:
        """Cancel the calls that other threads of this process wait for; their number.

        Parameters
        ----------
        everyone : bool
            Cancel all calls of the gang, of other processes as well, and ``.remote`` calls.

        Notes
        -----
        Who waits for such a call gets a `CancelledError`. The gang and its matrices stay.
        """
        reply = self.connection.request({"op": "cancel_calls", "all": everyone})
        return int(reply["cancelled"])

    def list_calls(self) -> builtins.list[CallInfo]:
        """The call that the gang runs, and those that wait, of all attached processes."""
        return builtins.list(calls_of(self.connection.request({"op": "status"})))


_sessions: weakref.WeakSet[GangOwner] = weakref.WeakSet()
_held: weakref.WeakSet[HeldGang] = weakref.WeakSet()


def open_sessions() -> list[GangOwner]:
    """The sessions of this process that have workers."""
    return [session for session in _sessions if session.has_workers]


@atexit.register
def _close_all() -> None:
    for session in list(_sessions):
        try:
            session.close()
        except Exception:  # the others are closed all the same
            log.exception("%r was not closed in good order", session)
    for held in list(_held):  # of sessions that are gone, while a handle is there
        if held.connection is not None:
            with contextlib.suppress(Exception):
                held.close(threading.RLock())
