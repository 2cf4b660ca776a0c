"""The last commands and transfers of this process, for traces."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

from mpi_workers.wire.frames import Body

KEPT = 20_000


class Moment(NamedTuple):
    """A point in time: seconds since the epoch, and of a clock that is not set."""

    at: float
    counter: float


class Event(NamedTuple):
    """Something that this process waited for.

    Attributes
    ----------
    name : str
        The command, ``send`` or ``fetch``.
    kind : str
        ``"command"`` (with the time in the queue) or ``"transfer"``.
    begun : float
        Seconds since the epoch.
    seconds : float
    thread : str
    facts : dict
        Further facts: ``nbytes``.
    """

    name: str
    kind: str
    begun: float
    seconds: float
    thread: str
    facts: dict[str, Any]


_events: deque[Event] = deque(maxlen=KEPT)


def now() -> Moment:
    """The beginning of an event."""
    return Moment(time.time(), time.perf_counter())


def add(name: str, kind: str, begun: Moment, **facts: Any) -> float:
    """Note an event that ends now; its seconds."""
    seconds = time.perf_counter() - begun.counter
    _events.append(Event(name, kind, begun.at, seconds, threading.current_thread().name, facts))
    return seconds


def since(at: float) -> list[Event]:
    """The events that ended after a time."""
    return [event for event in list(_events) if event.begun + event.seconds >= at]


def command_name(body: Body) -> str:
    """A command as users know it: ``linalg.svd``, a function's name, or the operation."""
    match body:
        case {"op": "call", "library": library, "routine": routine}:
            return f"{library}.{routine}"
        case {"op": "run", "task": {"name": name}}:
            return str(name)
    return str(body.get("op"))
