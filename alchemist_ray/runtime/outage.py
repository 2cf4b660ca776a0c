"""Outage: the time in which a gang has lost its ranks and waits for others."""

from __future__ import annotations

import asyncio

from alchemist_ray.errors import AlchemistError, to_failure
from alchemist_ray.runtime.failure_causes import recovered_words
from alchemist_ray.runtime.jobs import Job
from alchemist_ray.runtime.logged_command import LOSSES
from mpi_workers.failures import Failure

NOTICE_S = 1.0  # a caller that waits longer is told so
NOTICE = "ranks were lost: waiting until the gang is started again (max_failures)"


class Outage:
    """Whether a gang has its ranks, and the commands that wait for them.

    Attributes
    ----------
    recovering : bool
        Whether ranks were lost and others are being started.
    failure : AlchemistError or None
        The error that ended the gang.
    """

    def __init__(self) -> None:
        self.recovering = False
        self.failure: AlchemistError | None = None
        self._over = asyncio.Event()
        self._restored = ""
        self._pings: list[Job] = []

    def begin(self) -> None:
        """Ranks are lost, and others will be started."""
        self._over.clear()
        self.recovering = True

    def hold(self, job: Job) -> bool:
        """Keep a command that asks whether the gang is there, until it is; False if it is."""
        waits = self.recovering and job.body.get("op") == "ping" and job.body.get("wait")
        if waits:
            self._pings.append(job)
        return bool(waits)

    def end(self, restored: str) -> list[Job]:
        """The ranks are there again; the commands that were held."""
        self._restored = restored
        return self._finish()

    def give_up(self, error: AlchemistError) -> list[Job]:
        """There will be no ranks; the commands that were held."""
        self.failure = error
        return self._finish()

    def _finish(self) -> list[Job]:
        self.recovering = False
        self._over.set()
        pings, self._pings = self._pings, []
        return pings

    async def passed(self, job: Job) -> Failure | None:
        """Wait for ranks; None: there are some. Otherwise, what ended the gang."""
        loop = asyncio.get_running_loop()
        notice = loop.call_later(NOTICE_S, job.notice, NOTICE)
        await self._over.wait()
        notice.cancel()
        return None if self.failure is None else to_failure(self.failure)

    def lost(self, job: Job, *, repeatable: bool) -> Failure | None:
        """A command was lost with ranks; None: run it once more."""
        job.losses += 1
        if repeatable and job.losses < LOSSES:
            return None
        words = recovered_words(job.name, job.losses, self._restored)
        return Failure("GroupRecoveredError", words)
