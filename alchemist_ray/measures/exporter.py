"""Passes the counts of this process to Ray's metrics, every few seconds."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import ray
from ray.util import metrics as ray_metrics

from alchemist_ray.measures.metrics import METRICS, SECONDS, taken

EXPORT_INTERVAL_S = 5.0

_started_in = 0  # process id: threads do not survive a fork
_wanted = threading.Event()
_lock = threading.Lock()


def start(measure: Callable[[], None] | None = None) -> None:
    """Export the counts of this process from now on, after a call of `measure`, if it is given.

    Further calls do nothing.
    """
    global _started_in
    with _lock:
        if _started_in == os.getpid():
            return
        _started_in = os.getpid()
    threading.Thread(target=_run, args=(measure,), name="alchemist-metrics", daemon=True).start()
    atexit.register(export)


def soon() -> None:
    """Export the counts at once, in the thread that does so."""
    _wanted.set()


def export() -> None:
    """Pass the counts since the last export to Ray, if this process is in a cluster."""
    if not ray.is_initialized():  # a metric of a process without Ray ends it
        return
    counts = taken()
    # Metrics must not fail what they measure.
    with contextlib.suppress(Exception):
        for (name, labels), value in counts.added.items():
            if value > 0:
                _metric(name).inc(value, _tags(name, labels))
        for (name, labels), value in counts.gauges.items():
            _metric(name).set(value, _tags(name, labels))
        for (name, labels), times in counts.times.items():
            for seconds in times:
                _metric(name).observe(seconds, _tags(name, labels))


def _run(measure: Callable[[], None] | None) -> None:
    while True:
        _wanted.wait(EXPORT_INTERVAL_S)
        _wanted.clear()
        if measure is not None:
            measure()
        export()


def _tags(name: str, labels: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(METRICS[name].labels, labels, strict=True))


@cache
def _metric(name: str) -> Any:
    about = METRICS[name]
    match about.kind:
        case "counter":  # Ray appends _total
            return ray_metrics.Counter(name.removesuffix("_total"), about.text, about.labels)
        case "gauge":
            return ray_metrics.Gauge(name, about.text, about.labels)
    return ray_metrics.Histogram(name, about.text, boundaries=list(SECONDS), tag_keys=about.labels)
