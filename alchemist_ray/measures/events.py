"""The events of gangs and their commands, each declared once: log line, metrics, span.

`note` writes the line, counts the metrics (`metrics`) and keeps the span for traces (`trace`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from alchemist_ray.measures import metrics
from mpi_workers.wire.frames import Body

SPANS_KEPT = 20_000
Log = logging.Logger | logging.LoggerAdapter[Any]


@dataclass(frozen=True, slots=True)
class Event:
    """The declaration of an event.

    Attributes
    ----------
    text : str
        The line in the log, with facts in braces; empty: none.
    level : int
        Of the line.
    metrics : mapping of str to str
        Counters and histograms, and the fact that each adds; empty: 1. A label of a metric is the
        fact of its name.
    span : str
        Kind of the row in traces: ``"command"`` (with the time in the queue), ``"transfer"``;
        empty: none.
    """

    text: str = ""
    level: int = logging.INFO
    metrics: Mapping[str, str] = field(default_factory=dict)
    span: str = ""


STARTED = Event(
    "gang started in {seconds:.2f} s: {ranks}",
    metrics={"alchemist_starts_total": "", "alchemist_start_seconds": "seconds"},
)
NOT_STARTED = Event(
    "gang not started: {error}", logging.ERROR, metrics={"alchemist_starts_total": ""}
)
LOST = Event("ranks lost: {error}", logging.ERROR, metrics={"alchemist_failures_total": ""})
RECOVERED = Event("gang {result}", logging.WARNING, metrics={"alchemist_recoveries_total": ""})
CALLED = Event(
    "{name}: {outcome} after {seconds:.4f} s", logging.DEBUG,
    metrics={
        "alchemist_calls_total": "",
        "alchemist_call_seconds": "seconds",
        "alchemist_queue_seconds": "queued_s",
    },
)  # fmt: skip
ENDED = Event("gang ended")
COMMAND = Event(span="command")
TRANSFER = Event(
    metrics={
        "alchemist_transferred_bytes_total": "nbytes",
        "alchemist_transfer_seconds_total": "seconds",
    },
    span="transfer",
)
# Losses of environments, by name.
SIMULATOR_LOSSES = {
    name: Event(
        "simulator {simulator}: {name} +{count}: {cause}", logging.WARNING,
        metrics={f"alchemist_env_{name}_total": "count"},
    )
    for name in ("gang_restarts", "step_timeouts", "dropped_steps")
}  # fmt: skip


def note(event: Event, log: Log | None = None, **facts: Any) -> None:
    """Note an event with these facts: in the log, and in the metrics."""
    for name, added in event.metrics.items():
        about = metrics.METRICS[name]
        labels = [facts[label] for label in about.labels]
        if about.kind == "histogram":
            metrics.observe(name, facts[added], labels)
        else:
            metrics.count(name, labels, facts[added] if added else 1)
    if event.text and log is not None and log.isEnabledFor(event.level):
        log.log(event.level, "%s", event.text.format(**facts))


# --- spans, for traces ---


class Moment(NamedTuple):
    """A point in time: seconds since the epoch, and of a clock that is not set."""

    at: float
    counter: float


class Span(NamedTuple):
    """Something that this process waited for.

    Attributes
    ----------
    name : str
        The command, ``send`` or ``fetch``.
    kind : str
        As in `Event.span`.
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


_spans: deque[Span] = deque(maxlen=SPANS_KEPT)


def now() -> Moment:
    """The beginning of a span."""
    return Moment(time.time(), time.perf_counter())


def note_span(
    event: Event, name: str, begun: Moment, parts: Sequence[Body] = (), **facts: Any
) -> None:
    """Note an event that ends now, as a span with these facts.

    Parameters
    ----------
    parts : sequence of dict
        Facts for the metrics, which count each part: its labels, and the `share` of the time.
    """
    seconds = time.perf_counter() - begun.counter
    thread = threading.current_thread().name
    _spans.append(Span(name, event.span, begun.at, seconds, thread, facts))
    for part in parts:
        note(event, seconds=seconds * part["share"], **part)


def since(at: float) -> list[Span]:
    """The spans that ended after a time."""
    return [span for span in list(_spans) if span.begun + span.seconds >= at]
