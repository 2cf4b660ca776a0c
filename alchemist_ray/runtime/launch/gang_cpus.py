"""GangCpus: the CPUs and GPUs of a gang, which its incarnations use one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from alchemist_ray.background import in_pool, in_time
from alchemist_ray.cluster.actors import result_of
from alchemist_ray.cluster.placement import (
    Bundles,
    Reservation,
    check_capacity,
    divisions,
    not_free,
    reserved,
)
from alchemist_ray.errors import AlchemistError, ResourceError
from alchemist_ray.runtime.launch.gang_request import GangRequest

# Ray may notice 0.1 s later that CPUs were given back, and tries a group that did not fit again
# only after up to a second. So a group for the CPUs that are free now is asked for again, for a
# while; the one that is queued then waits until the limit.
ASKED_AGAIN_S = 0.2
AGAIN_S = 0.03


@dataclass(slots=True)
class _Held:
    name: str
    reservation: Reservation | None = None  # while it is waited for
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ranks(self) -> list[tuple[str, Mapping[str, str]]]:
        """The node and the devices of each rank that has CPUs here."""
        if self.reservation is None:
            return []
        nodes = [node for node, count in self.reservation.nodes for _ in range(count)]
        return list(zip(nodes, self.reservation.devices or [{}] * len(nodes), strict=True))

    async def release(self) -> None:
        try:
            if self.reservation is not None:
                with contextlib.suppress(RayError):
                    await in_pool(self.reservation.release)
        finally:
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
        self._avoided: set[str] = set()

    def avoid(self, node: str) -> int:
        """Use a node no longer, from the next incarnation on; the ranks with CPUs elsewhere."""
        self._avoided.add(node)
        return self.count

    @property
    def count(self) -> int:
        """For how many ranks there are CPUs."""
        return len(self._ranks())

    def _ranks(self) -> list[tuple[str, Mapping[str, str]]]:
        return [rank for held in self._held for rank in self._of(held)]

    def _of(self, held: _Held) -> list[tuple[str, Mapping[str, str]]]:
        return [(node, seen) for node, seen in held.ranks if node not in self._avoided]

    def nodes(self, workers: int) -> tuple[tuple[str, int], ...]:
        """The nodes of the first `workers` ranks that have CPUs, and how many are on each."""
        return tuple(Counter(node for node, _ in self._ranks()[:workers]).items())

    def devices(self, workers: int) -> dict[str, tuple[Mapping[str, str], ...]]:
        """The GPUs that the ranks of each node see, in the order of the ranks."""
        found: dict[str, tuple[Mapping[str, str], ...]] = {}
        for node, seen in self._ranks()[:workers]:
            found[node] = (*found.get(node, ()), seen)
        return found

    async def reserve(self, workers: int, limit_s: float) -> None:
        """Reserve CPUs, until this many ranks have some.

        Raises
        ------
        ResourceError
            If the cluster does not have them, or they are not free in time.
        """
        inherited, options = self._request.inherited, self._request.options
        there = [node for node, _ in self._ranks()]
        more = workers - len(there)
        if more <= 0:
            return
        if inherited is not None:
            if there:
                raise ResourceError(
                    "the gang cannot grow: its creator has reserved its CPUs, for "
                    f"{len(there)} workers. A gang with placement='own' can grow"
                )
            self._held.append(_Held("", inherited))
            return
        await in_pool(check_capacity, workers, options.each, options.strategy)
        avoided = {*self._avoided, *(there if options.strategy == "STRICT_SPREAD" else ())}
        where = f"!in({','.join(sorted(avoided))})" if avoided else ""
        if there and options.strategy == "STRICT_PACK":
            where = there[0]
        at_once, queued = await in_pool(divisions, more, options.each, options.strategy, avoided)
        deadline = time.monotonic() + limit_s
        asked_again = time.monotonic() + min(ASKED_AGAIN_S, limit_s / 2)
        instead = False
        while time.monotonic() < asked_again:
            if await self._reserved(at_once, where, deadline, instead=instead, patient=False):
                return
            instead = True
            await asyncio.sleep(AGAIN_S)
        if not await self._reserved(queued, where, deadline, instead=instead, patient=True):
            raise await in_pool(not_free, more, options.each, limit_s)

    async def _reserved(
        self, ranks: Sequence[int], where: str, deadline: float, *, instead: bool, patient: bool
    ) -> bool:
        """Reserve CPUs for this many ranks in each bundle; False if they are not free in time.

        `patient`: see `reserved`.
        """
        nodes = [where] * len(ranks) if where else []
        strategy, each = self._request.options.strategy, self._request.options.each
        asking = self._asked(ranks, strategy, nodes, instead=instead)
        held, group = await in_time(asking, deadline - time.monotonic())
        left_s = max(0.0, deadline - time.monotonic())
        try:
            held.reservation = await in_pool(
                lambda: reserved(group, ranks, each, left_s, patient=patient)
            )
        finally:
            if held.reservation is None:
                self._forget(held)
        return held.reservation is not None

    def _forget(self, held: _Held) -> None:
        if held in self._held:
            self._held.remove(held)
        held.released.set()

    async def _asked(
        self, ranks: Sequence[int], strategy: str, nodes: Sequence[str], *, instead: bool
    ) -> tuple[_Held, PlacementGroup]:
        """Have the Driver ask for CPUs, for this many ranks in each bundle; see `ask_for`.

        `instead`: whether others were asked for before, and are given up.
        """
        held = _Held(next(self._names))
        request = self._request
        self._held.append(held)  # first: `holding` is called as soon as the Driver has asked
        here = ray.get_runtime_context().get_node_id()
        bundles = Bundles(ranks, request.options.each, strategy, nodes)
        about = (self._gang, held.name, bundles, here, request.user, instead)
        try:
            return held, await result_of(self._driver.reserve.remote(*about))
        except BaseException as error:
            self._forget(held)
            if isinstance(error, RayTaskError) and isinstance(error.cause, AlchemistError):
                raise error.cause from None
            raise

    async def holding(self, name: str) -> None:
        """Return when a reservation has been given back; see `Driver.reserve`."""
        for held in list(self._held):
            if held.name == name:
                await held.released.wait()

    async def keep(self, workers: int) -> None:
        """Give CPUs back, except those of the first `workers` ranks.

        A part of a placement group cannot be given back: another one is asked for on the nodes
        of the ranks that stay, before the whole one is given back. It waits for its CPUs if other
        work gets them first. With GPUs the whole one stays: another one may get other GPUs.
        """
        whole = self._request.inherited is not None or self._request.options.gpus_per_worker > 0
        kept: list[_Held] = []
        for held in list(self._held):
            ranks = self._of(held)[: max(0, workers)]
            workers -= len(ranks)
            if ranks and len(ranks) < len(held.ranks) and not whole:
                counts = Counter(node for node, _ in ranks)
                try:
                    part, group = await self._asked(
                        list(counts.values()), "PACK", list(counts), instead=True
                    )
                except RayError:
                    kept.append(held)
                    continue
                part.reservation = Reservation(tuple(counts.items()), group)
                kept.append(part)
            elif ranks:
                kept.append(held)
        old = [held for held in self._held if held not in kept]
        self._held = kept
        await asyncio.gather(*(held.release() for held in old))

    async def release(self) -> None:
        """Give all CPUs back."""
        await self.keep(0)
