"""The control channel: commands from an attached process to the gang's dispatcher, over a socket.

Ctrl-C is deferred while a frame is sent or received.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from signal import SIGINT
from types import FrameType
from typing import Any, Self

from alchemist_ray.attached import progress
from alchemist_ray.errors import (
    NEXT_GANG,
    AlchemistError,
    GroupFailedError,
    SessionError,
    from_failure,
)
from alchemist_ray.measures import events
from alchemist_ray.tracebacks import callers_traceback
from mpi_workers.failures import Failure
from mpi_workers.protocol.commands import command_name
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Frame, Kind

# The same functions of `signal` make enumerations, which takes ten times as long.


class DeferredInterrupt:
    """A context that defers SIGINT; at its end the previous handler runs.

    A KeyboardInterrupt between two bytes of a frame would leave the stream unreadable. Only the
    main thread of a process gets signals; in others this does nothing. Cost: two system calls.
    """

    def __enter__(self) -> Self:
        self._pending: tuple[int, FrameType | None] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self._handler = _signal.getsignal(SIGINT)
            if callable(self._handler):
                _signal.signal(SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = (number, frame)

    def __exit__(self, *_: object) -> None:
        if callable(self._handler):
            _signal.signal(SIGINT, self._handler)
            if self._pending is not None:
                self._handler(*self._pending)


OnProgress = Callable[[float, str], None]
OnFrame = Callable[[Body, str], None]
MANAGER_GONE = "GroupManager gone"
OPENING_S = 3.0
# `ray.cancel` of a running task sends no signal: its KeyboardInterrupt does not end a system call.
CANCEL_POLL_S = 0.5


@dataclass(slots=True, eq=False)
class _Call:
    """A command under way, and the frames that have arrived for it."""

    ident: int
    op: str
    frames: deque[Frame] = field(default_factory=deque)


class SocketChannel:
    """Commands over a socket. Thread-safe: each command has an id, and its thread gets its answer.

    One of the waiting threads reads the socket for all of them, so that an answer for a lone
    caller needs no switch between threads.

    Parameters
    ----------
    connection : Connection
        To the dispatcher, after the handshake.
    address : str
        Of the dispatcher, for messages.
    on_frame : callable(body, op), optional
        Called by the thread that reads, with each frame and the command that it is for (empty:
        no thread waits for it), before the thread that waits goes on.
    """

    def __init__(
        self, connection: Connection, address: str, on_frame: OnFrame | None = None
    ) -> None:
        self._connection = connection
        self._on_frame = on_frame
        self._address = address
        self._sending = threading.Lock()
        self._changed = threading.Condition()  # guards what follows
        self._calls: dict[int, _Call] = {}
        self._last_ident = 0
        self._reading = False
        self._lost: AlchemistError | None = None

    @property
    def same_node(self) -> bool:
        """Whether the dispatcher runs on this node."""
        return self._address.startswith("unix:")

    def known_loss(self) -> AlchemistError | None:
        """Why the connection is of no more use, if that is known before a command is sent."""
        with self._changed:
            waiting = bool(self._calls)  # then a thread reads, or is about to
        if not waiting:
            self._drain()
        return self._lost and self._lost.again()

    def _drain(self) -> None:
        """Read what has arrived, if no other thread does."""
        with self._changed:
            if self._lost is not None or self._reading:
                return
            self._reading = True
        try:
            while self._lost is None and self._connection.readable(0.0):
                self._read()
        finally:
            with self._changed:
                self._reading = False
                self._changed.notify_all()

    def request(self, body: Body, on_progress: OnProgress | None = None) -> Body:
        """Run a command. Raises `AlchemistError`; Ctrl-C cancels the command."""
        begun = events.now()
        call = self._send(body, answered=True)
        try:
            while True:
                frame = self._next_frame(call)
                answer = frame.body
                if frame.kind == Kind.EVENT:
                    if "output" in answer:
                        progress.show(answer["output"])
                    elif on_progress is not None:
                        on_progress(answer["fraction"], answer["text"])
                elif "error" in answer:
                    raise from_failure(Failure.from_map(answer["error"]))
                else:
                    result: Body = answer["result"]
                    return result
        except BaseException as error:
            if not isinstance(error, AlchemistError):  # Ctrl-C, or another signal's handler raised
                self._cancel(call)
            if isinstance(error, KeyboardInterrupt):  # IPython shows 79 lines of this package
                shown = partial(callers_traceback, error, error)
                error._render_traceback_ = shown  # type: ignore[attr-defined]
            raise
        finally:
            events.note_span(events.COMMAND, command_name(body), begun)
            with self._changed:
                self._calls.pop(call.ident, None)

    def tell(self, body: Body) -> None:
        """Send a command and do not wait for its answer."""
        with contextlib.suppress(AlchemistError):  # the next request reports it
            self._send(body, answered=False)

    def cancel(self) -> None:
        """Cancel the commands that other threads wait for."""
        with self._changed:
            calls = list(self._calls.values())
        for call in calls:
            self._cancel(call)

    def _cancel(self, call: _Call) -> None:
        with DeferredInterrupt():  # a second Ctrl-C would leave the ranks in the call
            self.tell({"op": "cancel", "call": call.ident})

    def _send(self, body: Body, *, answered: bool) -> _Call:
        with self._changed:
            if self._lost is not None:
                raise self._lost.again()
            self._last_ident += 1
            call = _Call(self._last_ident, str(body.get("op", "")))
            if answered:
                self._calls[call.ident] = call
        try:
            with self._sending, DeferredInterrupt():
                # A command without a number gets no answer.
                self._connection.send(
                    Kind.COMMAND, {**body, "id": call.ident} if answered else body
                )
        except BaseException as error:
            with self._changed:
                self._calls.pop(call.ident, None)
            if isinstance(error, Failure):  # more than a frame may hold; nothing was sent
                raise from_failure(error) from None
            if isinstance(error, frames.WireError | OSError):
                self._drain()  # it may say why it has closed the connection
                raise self._lose(error) from error
            if isinstance(error, KeyboardInterrupt):  # after the frame was sent
                self._cancel(call)
            raise
        return call

    def _next_frame(self, call: _Call) -> Frame:
        """The next frame for a call; reads the socket if no other thread does."""
        while True:
            reader = False
            try:
                with self._changed:
                    while not call.frames and self._lost is None and self._reading:
                        self._changed.wait(CANCEL_POLL_S)
                    if call.frames:
                        return call.frames.popleft()
                    if self._lost is not None:
                        raise self._lost.again()
                    reader = self._reading = True
                self._read()
            finally:
                if reader:
                    with self._changed:
                        self._reading = False
                        self._changed.notify_all()

    def _read(self) -> None:
        """Wait for a frame and give it to its call. Ctrl-C ends the wait, never a frame."""
        while not self._connection.readable(CANCEL_POLL_S):
            pass
        with DeferredInterrupt():
            try:
                frame = self._connection.recv()
            except (frames.WireError, OSError) as error:
                self._lose(error)
                return
            if frame.kind == Kind.REFUSED:
                self._lose(from_failure(Failure.from_map(frame.body)))
                return
            with self._changed:
                call = self._calls.get(frame.body.get("id", 0))
            if self._on_frame is not None:
                self._on_frame(frame.body, "" if call is None else call.op)
            if call is not None:  # else its thread was interrupted, or never waited
                call.frames.append(frame)

    def _lose(self, error: BaseException) -> AlchemistError:
        """The connection is of no more use: every waiting thread gets the same error."""
        with self._changed:
            if self._lost is None:
                self._lost = (
                    error
                    if isinstance(error, AlchemistError)
                    else GroupFailedError(
                        "the connection to the gang's GroupManager was lost, and with it the gang: "
                        f"{error} ({self._address}). {NEXT_GANG}",
                        cause=MANAGER_GONE,
                    )
                )
            self._changed.notify_all()
            return self._lost.again()

    def settle(self) -> None:
        """After a loss: wait for the thread that still reads what had arrived before."""
        self._connection.hang_up()
        with self._changed:
            self._changed.wait_for(lambda: not self._reading, OPENING_S)

    def close(self) -> None:
        self.tell({"op": "goodbye"})
        self._connection.hang_up()
        with self._changed:
            if self._lost is None:
                self._lost = SessionError("the connection to the gang was closed")
            self._changed.notify_all()
        self._connection.close()
