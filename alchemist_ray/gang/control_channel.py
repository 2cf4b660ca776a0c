"""A client's line to a gang's dispatcher: the socket where it can be reached, else Ray."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from alchemist_ray.errors import AlchemistError, GroupFailedError, SessionError, from_failure
from alchemist_ray.gang import rank_output
from alchemist_ray.gang.address import GangAddress
from mpi_workers.failures import Failure
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, Frame, Kind

OnProgress = Callable[[float, str], None]
MANAGER_GONE = "GroupManager gone"


class ControlChannel(Protocol):
    """Sends commands to a gang and waits for what comes of them."""

    def request(self, body: Body, on_progress: OnProgress | None = None) -> Body:
        """Run a command. Raises the tree's errors; Ctrl-C cancels it on the gang, too."""

    def cancel(self) -> None:
        """Cancel the command that another thread waits for."""

    def tell(self, body: Body) -> None:
        """Send a command before the next, and do not wait for its answer."""

    def close(self) -> None:
        """Say goodbye."""


class SocketChannel:
    """The quick door: a round trip costs no Ray call. Thread-safe; one command at a time.

    Parameters
    ----------
    dial : callable() -> Connection
        Opens a connection to the dispatcher.
    address : str
        Where that is, for people.
    """

    def __init__(self, dial: Callable[[], Connection], address: str) -> None:
        self._dial = dial
        self._address = address
        self._lock = threading.Lock()
        self._ident = 0
        self._use(dial())

    def _use(self, connection: Connection) -> None:
        self._connection = connection
        self._reading = False
        self._news = select.poll()
        self._news.register(connection.sock, select.POLLIN)

    def request(self, body: Body, on_progress: OnProgress | None = None) -> Body:
        with self._lock:
            self._ident += 1
            try:
                self._connection.send(Kind.COMMAND, {**body, "id": self._ident})
                while True:
                    frame = self._receive()
                    answer = frame.body
                    if frame.kind == Kind.REFUSED:
                        raise from_failure(Failure.from_map(answer))
                    if answer.get("id") != self._ident:
                        continue  # of a command whose wait was broken off
                    if frame.kind == Kind.EVENT:
                        if "output" in answer:
                            rank_output.show(answer["output"])
                        elif on_progress is not None:
                            on_progress(answer["fraction"], answer["text"])
                        continue
                    if "error" in answer:
                        raise from_failure(Failure.from_map(answer["error"]))
                    result: Body = answer["result"]
                    return result
            except AlchemistError:  # the answer; a timeout is an OSError as well
                raise
            except Failure as failure:  # more than a frame's map may hold; nothing was sent
                raise from_failure(failure) from None
            except (frames.WireError, OSError) as error:
                raise GroupFailedError(
                    f"the gang's GroupManager at {self._address} is gone, and the gang with it: "
                    f"{error}. request_workers() starts a new one",
                    cause=MANAGER_GONE,
                ) from error
            except KeyboardInterrupt:
                self._cancel()
                raise

    def tell(self, body: Body) -> None:
        with self._lock, contextlib.suppress(frames.WireError, OSError):  # the next one says it
            self._ident += 1  # its answer is passed over as of another command
            self._connection.send(Kind.COMMAND, {**body, "id": self._ident})

    def cancel(self) -> None:
        with contextlib.suppress(frames.WireError, OSError):  # who waits for it knows
            self._connection.send(Kind.COMMAND, {"op": "cancel", "call": self._ident})

    def _receive(self) -> Frame:
        # Ctrl-C is awaited where no byte can be lost to it: not in the middle of a frame.
        if not self._connection.has_news():
            self._news.poll()
        self._reading = True
        frame = self._connection.recv()
        self._reading = False
        return frame

    def _cancel(self) -> None:
        """Nobody waits for the command any more: tell the dispatcher, and go on without it."""
        with contextlib.suppress(frames.WireError, OSError, Failure):
            self._connection.send(Kind.COMMAND, {"op": "cancel", "call": self._ident})
            if self._reading:  # who knows where the next frame begins
                old = self._connection
                self._use(self._dial())
                old.send(Kind.COMMAND, {"op": "goodbye"})
                old.close()

    def close(self) -> None:
        try:
            self._connection.send(Kind.COMMAND, {"op": "goodbye"})
        except (frames.WireError, OSError):
            pass  # it went first
        finally:
            self._connection.close()


class RayChannel:
    """The other door, for a client that the sockets do not reach."""

    def __init__(self, manager: ActorHandle, epoch: int) -> None:
        self._manager = manager
        self._epoch = epoch
        self._under_way: Any = None

    def request(self, body: Body, on_progress: OnProgress | None = None) -> Body:
        ref: Any = self._manager.command.remote(self._epoch, body)
        self._under_way = ref
        try:
            result: Body = ask_manager(ref)
        except KeyboardInterrupt:
            ray.cancel(ref)
            raise
        return result

    def cancel(self) -> None:
        if self._under_way is not None:
            ray.cancel(self._under_way)

    def tell(self, body: Body) -> None:
        self._manager.command.remote(self._epoch, body)

    def close(self) -> None:
        """Nothing to close."""


def ask(ref: Any, timeout_s: float | None = None) -> Any:
    """`ray.get` that raises the tree's errors instead of Ray's wrappings of them."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, AlchemistError):
            raise error.cause from None
        if isinstance(error.cause, Failure):
            raise from_failure(error.cause) from None
        raise


def ask_manager(ref: Any, timeout_s: float | None = None) -> Any:
    """The same for a GroupManager, whose death is its gang's."""
    try:
        return ask(ref, timeout_s)
    except RayActorError as error:
        raise GroupFailedError(
            "the gang's GroupManager is gone, and the gang with it. request_workers() starts a "
            "new one",
            cause=MANAGER_GONE,
        ) from error


def open_control_channel(
    gang_address: GangAddress, manager: ActorHandle, *, owner: bool
) -> ControlChannel:
    """A line to the gang. `owner`: the gang ends when this process is gone."""
    near = [a for a in gang_address.addresses if sockets.reachable_here(a)]
    far = [a for a in gang_address.addresses if a.startswith("tcp:")]
    for address in (*near, *far):

        def dial(address: str = address) -> Connection:
            hello = {"role": "client", "owner": owner}
            return connect(address, gang_address.token, hello, timeout_s=3.0, take_fds=False)[0]

        try:
            return SocketChannel(dial, address)
        except (OSError, frames.WireError):
            continue
        except Failure as failure:
            raise from_failure(failure) from None
    return RayChannel(manager, gang_address.epoch)


def no_workers() -> SessionError:
    return SessionError("the session has no workers: request_workers(n) starts a gang")
