"""Counts of lost gangs, restarts and dropped steps: in `info`, in the log, and as Ray metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque

from alchemist_ray.measures import events, metrics

HOUR_S = 3600.0
RESTARTS, TIMEOUTS, DROPPED = "gang_restarts", "step_timeouts", "dropped_steps"
EVENTS = tuple(events.SIMULATOR_LOSSES)

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
        loss = {"simulator": self._simulator, "name": name, "count": count, "cause": cause}
        events.note(events.SIMULATOR_LOSSES[name], log, **loss)

    def stepped(self, copies: int) -> None:
        """Count a step of each of the copies, for the metrics."""
        metrics.count("alchemist_env_steps_total", (self._simulator,), copies)

    def info(self) -> dict[str, int]:
        """All counts, or nothing where nothing was lost."""
        return {name: self._counts[name] for name in EVENTS} if self._counts else {}
