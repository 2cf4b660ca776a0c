"""Waits for a peer that answers within microseconds: sleeping and waking take longer than that."""

from __future__ import annotations

import select
import time

SPIN_S = 50e-6
MOST_SKIPPED = 512  # waits


class ShortWait:
    """Polls for `SPIN_S` before it sleeps, while that pays.

    After a wait that was longer it sleeps at once for some waits, twice as many each time: on busy
    cores, or for slow peers, it polls in one of 512 waits.

    Parameters
    ----------
    poll : select.poll
        Its descriptors are waited for.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll.poll
        self._left = 0  # waits without polling
        self._skipped = 1

    def __call__(self, timeout_ms: float | None) -> list[tuple[int, int]]:
        """As ``select.poll.poll``."""
        poll = self._poll
        if self._left:
            self._left -= 1
            return poll(timeout_ms)
        end = time.perf_counter() + SPIN_S
        while not (news := poll(0)) and time.perf_counter() < end:
            pass
        if news and time.perf_counter() < end + SPIN_S:  # else another process had the core
            self._skipped = 1
            return news
        self._left = self._skipped
        self._skipped = min(2 * self._skipped, MOST_SKIPPED)
        return news or poll(timeout_ms)
