"""JobQueue: the commands of a gang that wait; each sender has a queue, served in turn."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from alchemist_ray.runtime.jobs import Job


class JobQueue:
    """Waiting commands. Those of the dispatcher itself are urgent: they come first."""

    def __init__(self) -> None:
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

    def add_urgent(self, job: Job) -> None:
        """Queue a command before all others."""
        self._urgent.append(job)

    def next(self) -> Job | None:
        """Take the next command: urgent ones first, then sender by sender."""
        if self._urgent:
            return self._urgent.popleft()
        if not self._by_sender:
            return None
        sender, queue = self._by_sender.popitem(last=False)
        if len(queue) > 1:
            self._by_sender[sender] = queue  # at the end: the others come first
        self._count -= 1
        return queue.popleft()

    def of(self, sender: Any) -> tuple[Job, ...]:
        """The waiting commands of a sender."""
        return tuple(self._by_sender.get(sender, ()))

    def remove(self, job: Job) -> None:
        """Take a command out, wherever it waits."""
        for sender, queue in list(self._by_sender.items()):
            with contextlib.suppress(ValueError):
                queue.remove(job)
                self._count -= 1
            if not queue:
                del self._by_sender[sender]

    def drop(self, sender: Any) -> None:
        """Forget the commands of a sender that is gone."""
        self._count -= len(self._by_sender.pop(sender, ()))

    def clear(self) -> list[Job]:
        """Take all commands out; those of senders."""
        waiting = list(self)
        self._urgent.clear()
        self._by_sender.clear()
        self._count = 0
        return waiting
