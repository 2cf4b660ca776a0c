"""Counts of lost gangs, restarts and dropped steps: in `info`, in the log, and as Ray metrics."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from functools import cache
from typing import Any

from ray.exceptions import RayError
from ray.util import metrics

HOUR_S = 3600.0
RESTARTS, TIMEOUTS, DROPPED = "gang_restarts", "step_timeouts", "dropped_steps"
DESCRIPTIONS = {
    RESTARTS: "Gangs that were started because the one before was lost",
    TIMEOUTS: "Steps and resets that exceeded step_timeout_s",
    DROPPED: "Steps of sub-environments that failed and were not simulated",
}

log = logging.getLogger(__name__)
_lock = threading.Lock()
in_this_process: Counter[str] = Counter()  # of all environments, for RLlib's metrics


class RestartRate:
    """Events within a window of time, for a limit per hour."""

    def __init__(self, window_s: float = HOUR_S) -> None:
        self._window_s = window_s
        self._times: deque[float] = deque()

    def add(self) -> None:
        """Count an event now."""
        self._times.append(time.monotonic())

    def recent(self) -> int:
        """The number of events within the window."""
        while self._times and time.monotonic() - self._times[0] > self._window_s:
            self._times.popleft()
        return len(self._times)


class Losses:
    """Counts of the losses of one environment.

    Parameters
    ----------
    simulator : str
        Its name, for log lines and as the tag of the metrics.
    """

    def __init__(self, simulator: str) -> None:
        self._simulator = simulator
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int, cause: BaseException | str) -> None:
        """Count a loss, log its cause, and export it."""
        if not count:
            return
        with _lock:  # gangs of a vector environment step in threads
            self._counts[name] += count
            in_this_process[name] += count
        log.warning("simulator %s: %s +%d: %s", self._simulator, name, count, cause)
        with contextlib.suppress(RayError, ValueError):  # metrics must not fail a step
            _counter(name).inc(count, {"simulator": self._simulator})

    def info(self) -> dict[str, int]:
        """All counts, or nothing where nothing was lost."""
        return {name: self._counts[name] for name in DESCRIPTIONS} if self._counts else {}


@cache
def _counter(name: str) -> Any:
    return metrics.Counter(
        f"alchemist_env_{name}", description=DESCRIPTIONS[name], tag_keys=("simulator",)
    )
