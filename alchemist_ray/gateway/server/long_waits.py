"""Calls that may wait for minutes, for CPUs or for a gang: they hold up no other call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mpi_workers.failures import Failure

MAX_WAITS = 1024  # a thread each, as long as it waits
MAX_WAITS_OF_USER = 256

T = TypeVar("T")


class LongWaits:
    """Threads for calls that start gangs, resize them or attach to them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_WAITS, "alchemist-gateway-wait")
        self._by_user: Counter[str] = Counter()

    async def run(self, user: str, action: Callable[..., T], *args: Any) -> T:
        """The result of an action in a thread. Raises `Failure` if too many are under way."""
        mine, all_users = self._by_user[user], self._by_user.total()
        if mine >= MAX_WAITS_OF_USER or all_users >= MAX_WAITS:
            raise Failure(
                "ResourceError",
                f"too many gangs are being started, resized or attached to: {mine} by {user} "
                f"(limit {MAX_WAITS_OF_USER}), {all_users} by all users (limit {MAX_WAITS}). Wait "
                "until some of these calls have ended",
            )
        self._by_user[user] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, action, *args)
        finally:
            self._by_user -= Counter([user])

    def close(self) -> None:
        """Start no more threads; those that wait end with their calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)
