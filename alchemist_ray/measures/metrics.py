"""The metrics of Alchemist: their table, and the counts of this process.

Counting costs a dictionary update. `exporter` passes the counts on to Ray, where there is one; its
nodes' agents export them to Prometheus, with ``ray_`` before each name.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

Labels = tuple[str, ...]
SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
MOST_TIMES = 10_000  # of a histogram between two exports: further ones are left out
PRIVATE = "private"  # the label `gang` of gangs without a name
MOST_LABELS = 500  # values of the label `routine` in a process; further ones are "other"
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes
    ----------
    kind : str
        ``"counter"``, ``"gauge"`` or ``"histogram"``.
    labels : tuple of str
        Names of its labels.
    text : str
        What it counts, in the unit that its name ends with.
    """

    kind: str
    labels: tuple[str, ...]
    text: str


COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
# Name, kind, labels, text.
TABLE = (
    ("gangs", GAUGE, "gang state user", "gangs"),
    ("ranks", GAUGE, "gang node", "MPI ranks that run"),
    ("gpus", GAUGE, "gang node", "GPUs that are reserved for ranks"),
    ("held_bytes", GAUGE, "gang node", "memory of a gang's matrices on a node, copies included"),
    ("free_bytes", GAUGE, "node", "memory that the next matrix can use on a node with ranks"),
    ("processes", GAUGE, "gang", "attached processes"),
    ("queued_calls", GAUGE, "gang", "commands that wait for their turn"),
    ("queue_seconds", HISTOGRAM, "gang", "time that commands waited for their turn"),
    ("calls_total", COUNTER, "gang library routine outcome",
     "commands that ended: routines, functions (library `run`) and commands of the gang itself "
     "(library `gang`); outcome `ok`, `failed`, `cancelled`, or `refused`: a quota, or a lack of "
     "memory"),
    ("call_seconds", HISTOGRAM, "library routine", "time that calls ran"),
    ("starts_total", COUNTER, "outcome", "starts of gangs; outcome `ok` or `failed`"),
    ("start_seconds", HISTOGRAM, "", "time of starts that succeeded"),
    ("failures_total", COUNTER, "gang cause",
     "losses of ranks; cause: a signal, `node lost`, `node leaving`, `ranks stuck in MPI`, ..."),
    ("recoveries_total", COUNTER, "gang outcome",
     "gangs that were started again (max_failures)"),
    ("transferred_bytes_total", COUNTER, "direction route",
     "elements moved; direction `send` or `fetch`"),
    ("transfer_seconds_total", COUNTER, "direction route",
     "time that callers waited for transfers"),
    ("gateway_sessions", GAUGE, "user", "processes with a session through a gateway"),
    ("gateway_bytes_total", COUNTER, "direction", "elements that a gateway has passed on"),
    ("gateway_refusals_total", COUNTER, "of cause",
     "refusals of a gateway; of `connection` or `command`, cause: the class of the error"),
    ("env_steps_total", COUNTER, "simulator", "steps of environments"),
    ("env_gang_restarts_total", COUNTER, "simulator",
     "gangs that were started because the one before was lost"),
    ("env_step_timeouts_total", COUNTER, "simulator",
     "steps and resets that exceeded step_timeout_s"),
    ("env_dropped_steps_total", COUNTER, "simulator",
     "steps of sub-environments that failed and were not simulated"),
)  # fmt: skip
METRICS = {
    f"alchemist_{name}": Metric(kind, tuple(labels.split()), text)
    for name, kind, labels, text in TABLE
}
# Ray's exporter gives the middle of its bucket to each time in the `_sum` of a histogram.
METRICS |= {
    f"{name.removesuffix('seconds')}time_seconds_total": Metric(
        COUNTER, about.labels, f"sum of `{name}` (its `_sum` is a guess)"
    )
    for name, about in METRICS.items()
    if about.kind == HISTOGRAM
}


@dataclass(slots=True)
class Counts:
    """The counts of a process since the last export, by metric and labels."""

    added: dict[tuple[str, Labels], float] = field(default_factory=dict)
    gauges: dict[tuple[str, Labels], float] = field(default_factory=dict)
    times: dict[tuple[str, Labels], list[float]] = field(default_factory=dict)


_lock = threading.Lock()
_counts = Counts()
_totals: dict[tuple[str, Labels], float] = {}  # of `shift`, without zeros
_seen: set[str] = set()


def count(metric: str, labels: Sequence[str] = (), by: float = 1) -> None:
    """Add to a counter."""
    with _lock:
        key = metric, tuple(labels)
        _counts.added[key] = _counts.added.get(key, 0) + by


def observe(metric: str, seconds: float, labels: Sequence[str] = ()) -> None:
    """Add a time to a histogram, and to the sum of its times."""
    count(f"{metric.removesuffix('seconds')}time_seconds_total", labels, seconds)
    with _lock:
        times = _counts.times.setdefault((metric, tuple(labels)), [])
        if len(times) < MOST_TIMES:
            times.append(seconds)


def gauge(metric: str, value: float, labels: Sequence[str] = ()) -> None:
    """Set a gauge."""
    with _lock:
        _counts.gauges[metric, tuple(labels)] = value


def shift(metric: str, by: float, labels: Sequence[str] = ()) -> None:
    """Add to a gauge that several gangs of this process have in common."""
    with _lock:
        key = metric, tuple(labels)
        total = _totals.pop(key, 0.0) + by
        if total:
            _totals[key] = total
        _counts.gauges[key] = total


def taken() -> Counts:
    """The counts since the last call."""
    global _counts
    with _lock:
        now, _counts = _counts, Counts()
    return now


def bounded(label: str) -> str:
    """A label that users choose, or `OTHER` when there are too many of them."""
    if label not in _seen:
        if len(_seen) >= MOST_LABELS:
            return OTHER
        _seen.add(label)
    return label
