"""Quotas of users: ranks, gangs, bytes. They count what a user has started through this gateway."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from alchemist_ray.errors import AlchemistError
from alchemist_ray.gateway.server.hosted_gang import HostedGang
from alchemist_ray.gateway.server.tokens import Token
from alchemist_ray.runtime.user_limits import check_limits
from mpi_workers.failures import Failure
from mpi_workers.matrix.sizes import readable
from mpi_workers.wire.frames import Body


class Quotas:
    """Checks quotas before anything is started or allocated.

    Parameters
    ----------
    gangs : mapping of str to HostedGang
        Those that are used now.
    """

    def __init__(self, gangs: Mapping[str, HostedGang]) -> None:
        self._gangs = gangs
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
        check_limits(token.user, gangs, ranks, token.gangs, token.ranks, "this token")
        self._starting[token.user] += 1
        self._ranks[token.user] += workers
        try:
            yield
        finally:
            self._starting[token.user] -= 1
            self._ranks[token.user] -= workers

    def check_nbytes(self, token: Token, body: Body) -> None:
        """Raise `Failure` if a command would exceed the quota of bytes. Blocks."""
        if token.nbytes is None:
            return
        new = 0
        if body.get("op") == "create":
            new = math.prod(body["shape"]) * np.dtype(body["dtype"]).itemsize
        held = 0
        for gang in self._of(token):
            with contextlib.suppress(AlchemistError):  # it has ended
                held += gang.nbytes()
        if held + new > token.nbytes or (not new and held >= token.nbytes):
            raise Failure(
                "ResourceError",
                f"the matrices of {token.user} have {readable(held)}, and {readable(new)} more "
                f"would exceed the quota of this token, {readable(token.nbytes)}: free some",
            )
