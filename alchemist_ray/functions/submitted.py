"""Calls that outlive their program: submitted to a gang, and their futures.

The gang's GroupManager has the calls and their results (`runtime.commands.call_store`).
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from alchemist_ray.arguments import MAX_SECONDS, checked_seconds
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.info import CallInfo
from alchemist_ray.attached.libraries import Routine, reported
from alchemist_ray.attached.progress import as_text
from alchemist_ray.background import in_thread
from alchemist_ray.errors import AlchemistError, BadArgumentError
from alchemist_ray.functions import user_code
from mpi_workers.wire.frames import Body

KEEP_S = 7 * 86_400.0
# 32 MiB of code or arguments: as a matrix, more waits for the call that runs.
GIVEN_NBYTES = 32 << 20
RESULT_NBYTES = 64 << 10  # 64 KiB; larger results of functions stay on the ranks


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is to be submitted; see `AlchemistSession.submit`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    limits: Body
    pure: bool
    label: str


def submit(connection: GangConnection, call: Call, keep_s: float) -> SubmittedCall:
    """See `AlchemistSession.submit`."""
    checked_seconds("keep_s", keep_s, BadArgumentError, most=MAX_SECONDS)
    if isinstance(routine := call.function, Routine):
        if routine.gang != (here := connection.address.gang):
            raise BadArgumentError(
                f"{routine.__qualname__} is loaded on gang {routine.gang}, and this session is on "
                f"gang {here}: take it from this session's load_library or library"
            )
        connection.before_commands()
        body = routine.command(call.args, call.kwargs)
    else:
        task, uses = user_code.packed_call(connection, call.function, call.args, call.kwargs)
        nbytes = {"given_nbytes": GIVEN_NBYTES, "result_nbytes": RESULT_NBYTES}
        body, _large = user_code.command_of(connection, task, uses, None, pure=call.pure, **nbytes)
    body |= {"label": str(call.label), **call.limits}
    ident = uuid.uuid4().hex
    connection.request({"op": "submit", "call": ident, "command": body, "keep_s": float(keep_s)})
    return connection.part(_SubmittedCalls).future(ident)


def futures(connection: GangConnection) -> list[SubmittedCall]:
    """See `AlchemistSession.futures`."""
    calls = connection.request({"op": "submitted"})["calls"]
    return [connection.part(_SubmittedCalls).future(about["id"]) for about in calls]


class SubmittedCall(Future[Any]):
    """The future of a call that was submitted to a gang, by this program or another one.

    `result` and `exception` read the result from the gang when they are called the first time.
    `concurrent.futures.wait`, `as_completed` and `asyncio.wrap_future` take it.

    Attributes
    ----------
    id : str
        The call's, in `AlchemistSession.list_calls` too.

    Notes
    -----
    It ends with a `GroupFailedError` if the gang is lost, and a `SessionError` when its session
    detaches.
    """

    def __init__(self, connection: GangConnection, ident: str) -> None:
        super().__init__()
        self.id = ident
        self._connection = connection
        self._read: list[Any] = []  # the value, once it has been read

    def _ask(self, op: str) -> Body:
        return self._connection.request({"op": op, "call": self.id})

    @property
    def info(self) -> CallInfo:
        """Name, label, state, caller and times, as the gang knows them now."""
        return CallInfo(**self._ask("call_state")["call"])

    @property
    def progress(self) -> tuple[float, str] | None:
        """The last progress that a routine has reported: a fraction and a text."""
        found = self._ask("call_state")["progress"]
        return tuple(found) if found else None

    @property
    def output(self) -> str:
        """The last 64 KiB that the ranks have printed during the call, with their ranks."""
        return as_text(self._ask("call_state")["output"])

    def running(self) -> bool:
        """Whether its turn has come, and it is not over."""
        return self.info.state == "running"

    def result(self, timeout: float | None = None) -> Any:
        """The result of the call; raises the error of the call.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Raises
        ------
        TimeoutError
            If it is not over then.
        concurrent.futures.CancelledError
            If it was cancelled.
        GroupError
            If it was forgotten, or its time to live is over.
        AlchemistError
            As `AlchemistSession.run`, and the routine.
        """
        super().result(timeout)
        if not self._read:
            reply = self._ask("call_result")
            if "value" in reply:
                self._read = [user_code.value_of(self._connection, reply)]
            else:
                self._read = [reported(reply, self.info.name, self._connection.handle)]
        return self._read[0]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that `result` would raise, or None."""
        error = super().exception(timeout)
        if error is None:
            try:
                self.result()
            except Exception as found:
                error = found
        return error

    def cancel(self) -> bool:
        """Cancel the call, also if it runs; returns whether it is cancelled."""
        if not self.done():
            self._ask("cancel_call")
            wait([self])
        return self.cancelled()

    def forget(self) -> None:
        """Free the result on the gang. Raises `GroupError` if the call is not over yet."""
        self._ask("forget_call")

    def end(self, *, cancelled: bool = False, error: BaseException | None = None) -> None:
        """The call is over, or nothing more will be known of it."""
        if error is not None:
            self.set_exception(error)
        elif not cancelled:
            self.set_result(None)
        elif super().cancel():
            self.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        try:
            info = self.info
        except AlchemistError as error:
            return f"<SubmittedCall {self.id}: {error}>"
        label = f" {info.label!r}" * bool(info.label)
        return f"<SubmittedCall {info.name}{label}, of {info.caller}: {info.state}>"


class _SubmittedCalls:
    """The futures of this process for calls on one gang; a thread waits for their ends."""

    def __init__(self, connection: GangConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._calls: weakref.WeakValueDictionary[str, SubmittedCall] = weakref.WeakValueDictionary()
        self._watched = False

    def future(self, ident: str) -> SubmittedCall:
        """The one future for a call."""
        with self._lock:
            found = self._calls.get(ident)
            if found is None:
                found = self._calls[ident] = SubmittedCall(self._connection, ident)
            if not self._watched and not found.done():
                self._watched = True
                in_thread(self._watch)
            return found

    def _open(self) -> dict[str, SubmittedCall]:
        with self._lock:
            found = {ident: call for ident, call in self._calls.items() if not call.done()}
            self._watched = bool(found)
        return found

    def _watch(self) -> None:
        while idents := list(self._open()):
            try:
                news = self._connection.request({"op": "submitted", "running": idents})
            except AlchemistError as error:
                for call in self._open().values():
                    call.end(error=error)
                continue
            states = {about["id"]: about["state"] for about in news["calls"]}
            for ident, call in self._open().items():
                state = states.get(ident, "forgotten")
                if ident in idents and state not in ("queued", "running"):
                    call.end(cancelled=state == "cancelled")
