"""Quotas of users: ranks, gangs, bytes. They count what a user has started through this gateway."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from alchemist_ray.errors import AlchemistError
from alchemist_ray.gateway.server.access import Token, TokenFile
from alchemist_ray.gateway.server.hosted_gang import HostedGang
from alchemist_ray.gateway.server.long_waits import LongWaits
from alchemist_ray.runtime.user_limits import check_limits
from mpi_workers.failures import Failure
from mpi_workers.matrix.sizes import readable
from mpi_workers.wire.frames import Body

WHOSE = "this user's tokens"


class Quotas:
    """Checks quotas before anything is started or allocated.

    Parameters
    ----------
    gangs : mapping of str to HostedGang
        Those that are used now.
    waits : LongWaits
        Asks gangs.
    tokens : TokenFile
    """

    def __init__(
        self, gangs: Mapping[str, HostedGang], waits: LongWaits, tokens: TokenFile
    ) -> None:
        self._tokens = tokens
        self._gangs = gangs
        self._waits = waits
        self._creating: dict[str, _Creating] = {}
        self._ranks: Counter[str] = Counter()  # of gangs that are being started, by user
        self._starting: Counter[str] = Counter()

    def _of(self, token: Token) -> list[HostedGang]:
        return [gang for gang in self._gangs.values() if gang.user == token.user]

    @contextlib.contextmanager
    def starting(
        self, token: Token, workers: int, resized: HostedGang | None = None
    ) -> Iterator[None]:
        """While a gang is being started, or `resized`. Raises if it exceeds the quota."""
        mine = [gang for gang in self._of(token) if gang is not resized]
        gangs = len(mine) + self._starting[token.user] + 1
        ranks = sum(gang.ranks for gang in mine) + self._ranks[token.user] + workers
        quota = self._tokens.quotas(token.user)
        check_limits(token.user, gangs, ranks, quota.gangs, quota.ranks, WHOSE)
        self._starting[token.user] += 1
        self._ranks[token.user] += workers
        try:
            yield
        finally:
            self._starting[token.user] -= 1
            self._ranks[token.user] -= workers

    async def reserve(self, token: Token, body: Body) -> Callable[[], None]:
        """Reserve the bytes of a command's new matrix, until the returned function is called.

        Call it when the gang has answered: then the gang counts them. Waits for other new
        matrices of the user if it depends on them whether this one fits. Raises `Failure` if it
        exceeds the quota.
        """
        limit = self._tokens.quotas(token.user).nbytes
        if limit is None:
            return _nothing
        new = 0
        if body.get("op") == "create":
            new = math.prod(body["shape"]) * np.dtype(body["dtype"]).itemsize
        creating = self._creating.setdefault(token.user, _Creating())
        while True:
            answered = creating.answered
            held = sum(
                await asyncio.gather(
                    *(self._waits.run(token.user, _nbytes, gang) for gang in self._of(token))
                )
            )
            if held + new > limit or (not new and held >= limit):
                raise Failure(
                    "ResourceError",
                    f"the matrices of {token.user} have {readable(held)}, and {readable(new)} more "
                    f"would exceed the quota of {WHOSE}, {readable(limit)}: free some",
                )
            if not new:
                return _nothing
            if answered.is_set():
                continue  # a gang was perhaps asked before it had the matrix
            if held + creating.nbytes + new <= limit:
                break
            await answered.wait()
        creating.nbytes += new
        return partial(creating.end, new)


class _Creating:
    """Matrices of a user that are being created: a gang may count them, or not yet."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.answered = asyncio.Event()

    def end(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self.answered.set()
        self.answered = asyncio.Event()


def _nothing() -> None:
    """Nothing was reserved."""


def _nbytes(gang: HostedGang) -> int:
    with contextlib.suppress(AlchemistError):  # it has ended
        return gang.nbytes()
    return 0
