"""GangCpus: the CPUs of a gang, which its incarnations use one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from alchemist_ray.runtime.gang_request import GangRequest
from alchemist_ray.runtime.placement import Reservation, check_capacity, reserved
from alchemist_ray.runtime.ray_calls import result_of

T = TypeVar("T")


@dataclass(slots=True)
class _Held:
    name: str
    reservation: Reservation | None = None  # while it is waited for
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def release(self) -> None:
        if self.reservation is not None:
            with contextlib.suppress(RayError):
                await in_thread(self.reservation.release)
        self.released.set()


class GangCpus:
    """Reservations of a gang.

    Parameters
    ----------
    gang, ident : str
        Name of the gang, and the beginning of the names of its reservations.
    request : GangRequest
    driver : actor
        Reserves, and gives the CPUs back if this process dies.
    """

    def __init__(self, gang: str, ident: str, request: GangRequest, driver: Any) -> None:
        self._gang = gang
        self._names = (f"{ident}-{number}" for number in itertools.count(1))
        self._request = request
        self._driver = driver
        self._held: list[_Held] = []

    @property
    def nodes(self) -> tuple[tuple[str, int], ...]:
        """The nodes, and how many ranks have CPUs on each."""
        counts: Counter[str] = Counter()
        for held in self._held:
            if held.reservation is not None:
                counts.update(dict(held.reservation.nodes))
        return tuple(counts.items())

    async def reserve(self, workers: int, limit_s: float) -> None:
        """Reserve CPUs for so many (more) ranks.

        Raises
        ------
        ResourceError
            If the cluster does not have them, or they are not free in time.
        """
        request = self._request
        if request.inherited is not None:
            self._held.append(_Held("", request.inherited))
            return
        await in_thread(check_capacity, workers, request.cpus, request.strategy)
        held = _Held(next(self._names))
        self._held.append(held)  # before the Driver asks for it
        try:
            group = await asyncio.wait_for(self._asked(held.name, workers), limit_s)
            held.reservation = await in_thread(reserved, group, workers, request.cpus, limit_s)
        except BaseException:
            self._held.remove(held)
            held.released.set()
            raise

    async def _asked(self, name: str, workers: int) -> Any:
        request, here = self._request, ray.get_runtime_context().get_node_id()
        return await result_of(
            self._driver.reserve.remote(
                self._gang, name, workers, request.cpus, here, request.strategy
            )
        )

    async def holding(self, name: str) -> None:
        """Return when a reservation has been given back; see `Driver.reserve`."""
        for held in list(self._held):
            if held.name == name:
                await held.released.wait()

    async def release(self, keep: int = 0) -> None:
        """Give the CPUs back; `keep`: not those of the last so many reservations."""
        old = self._held[: len(self._held) - keep]
        await asyncio.gather(*(held.release() for held in old))
        self._held = [held for held in self._held if held not in old]


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """The result of a blocking function that runs in a thread."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, functools.partial(function, *args))
