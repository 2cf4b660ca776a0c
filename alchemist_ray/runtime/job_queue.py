"""JobQueue: the commands of a gang that wait; each sender has a queue, served in turn."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

from alchemist_ray.runtime.jobs import Job


class JobQueue:
    """Waiting commands. Those of the dispatcher itself are urgent: they come first.

    Parameters
    ----------
    sending : callable() -> bool
        Whether matrices are being sent. A resize waits for them, and further ones wait for it.
    """

    def __init__(self, sending: Callable[[], bool]) -> None:
        self._sending = sending
        self._resize: Job | None = None
        self._urgent: deque[Job] = deque()
        self._by_sender: OrderedDict[Any, deque[Job]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Commands of senders that wait."""
        return self._count

    def __iter__(self) -> Iterator[Job]:
        return (job for queue in self._by_sender.values() for job in queue)

    def add(self, job: Job, sender: Any) -> None:
        """Queue a command of a sender."""
        self._by_sender.setdefault(sender, deque()).append(job)
        self._count += 1
        if job.body["op"] == "resize":
            self._resize = job

    def add_urgent(self, job: Job) -> None:
        """Queue a command before all others."""
        self._urgent.append(job)

    def next(self) -> Job | None:
        """Take the next command that may run: urgent ones first, then sender by sender."""
        if self._urgent:
            return self._urgent.popleft()
        for sender, queue in self._by_sender.items():
            job = next(filter(self._may_run, queue), None)
            if job is not None:
                self._by_sender.move_to_end(sender)  # the others come first
                self._take(job, sender)
                return job
        return None

    def _may_run(self, job: Job) -> bool:
        if job is self._resize:
            return not self._sending()
        return self._resize is None or job.body["op"] != "create"

    def _take(self, job: Job, sender: Any) -> None:
        """Remove a command of a sender. Raises `ValueError` if it is not there."""
        queue = self._by_sender[sender]
        queue.remove(job)
        self._count -= 1
        if not queue:
            del self._by_sender[sender]
        if job is self._resize:
            self._resize = None

    def of(self, sender: Any) -> tuple[Job, ...]:
        """The waiting commands of a sender."""
        return tuple(self._by_sender.get(sender, ()))

    def remove(self, job: Job) -> None:
        """Take a command out, wherever it waits."""
        for sender in list(self._by_sender):
            with contextlib.suppress(ValueError):
                self._take(job, sender)

    def drop(self, sender: Any) -> None:
        """Forget the commands of a sender that is gone."""
        self._count -= len(self._by_sender.pop(sender, ()))

    def clear(self) -> list[Job]:
        """Take all commands out; those of senders."""
        waiting = list(self)
        self._urgent.clear()
        self._by_sender.clear()
        self._count = 0
        self._resize = None
        return waiting
