"""Where the ranks of a gang go: a placement group of their own, or the caller's bundle.

Ray's time for a placement group grows with the square of the bundles that a node takes: 2048 on one
node take 7 s. A bundle per node, with the CPUs of all its ranks, takes some milliseconds.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from alchemist_ray.cluster.actors import gang_and_run
from alchemist_ray.errors import ResourceError
from alchemist_ray.plural import counted

MOST_WAITING = 256  # bundles of a gang whose CPUs are not free yet
SHOWN = 5  # holders of CPUs in an error
VARIABLE = "ALCHEMIST_GROWS_TO"  # "8x4": at most 8 nodes of 4 CPUs each


@dataclass(frozen=True, slots=True)
class Growth:
    """The largest cluster that an autoscaler may make, without nodes that have no CPUs."""

    nodes: int
    cpus: float

    @classmethod
    def here(cls) -> Growth | None:
        """From the environment; None for a cluster of fixed size. Raises `ResourceError`."""
        text = os.environ.get(VARIABLE, "")
        if not text:
            return None
        found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
        if found is None:
            raise ResourceError(
                f"{VARIABLE}={text!r}: it must be the maximum number of nodes and the CPUs of "
                "each, as in 8x4"
            )
        return cls(int(found[1]), float(found[2]))

    def grown(self, cpus: list[float]) -> list[float]:
        """CPUs of the present nodes (without those that have none), and of future ones."""
        there = [here for here in cpus if here > 0]
        return there + [self.cpus] * max(0, self.nodes - len(there))


def room(cpus: float, each: float) -> int:
    """How many ranks of `each` CPUs fit."""
    return int(cpus / each + 1e-9)


def divisions(
    workers: int, cpus: float, strategy: str, avoided: Collection[str] = ()
) -> list[list[int]]:
    """Ranks of each bundle: divisions of the ranks, to be tried in this order.

    The first is for the CPUs that are free now, with a bundle per node. Where they are not enough,
    or other work takes them first, smaller bundles wait: CPUs may become free on any nodes.

    Parameters
    ----------
    workers : int
    cpus : float
        Of each rank.
    strategy : str
        One of `attached.options.STRATEGIES`.
    avoided : collection of str
        Nodes that are not used.
    """
    if strategy == "STRICT_PACK":
        return [[workers]]
    if strategy == "STRICT_SPREAD":
        return [[1] * workers]
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoided]
    growth = Growth.here()
    if growth is None and len(nodes) == 1:
        return [[workers]]
    present = [node["Resources"].get("CPU", 0.0) for node in nodes]
    free = available_resources_per_node()
    unused = [room(free.get(node["NodeID"], {}).get("CPU", 0.0), cpus) for node in nodes]
    future = [room(c, cpus) for c in (present if growth is None else growth.grown(present))]
    now, later = per_node(workers, strategy, unused), in_pieces(workers, strategy, future)
    return [now, later] if now else [later]


def per_node(workers: int, strategy: str, rooms: list[int]) -> list[int]:
    """A bundle per node, if nodes have room for this many ranks; else empty.

    The largest bundle comes first. PACK uses few nodes, SPREAD all of them, as evenly as it can.
    """
    if workers > sum(rooms):
        return []
    shares, left = [], workers
    for index, here in enumerate(sorted(rooms, reverse=strategy == "PACK")):
        even = left // (len(rooms) - index)  # what a node takes less, larger ones take
        shares.append(min(here, left if strategy == "PACK" else even))
        left -= shares[-1]
    return sorted(filter(None, shares), reverse=True)


def in_pieces(workers: int, strategy: str, rooms: list[int]) -> list[int]:
    """A bundle per rank, or of as few ranks as `MOST_WAITING` bundles allow."""
    each = math.ceil(workers / MOST_WAITING)
    shares = per_node(workers, strategy, rooms) or [workers]
    return [min(each, share - first) for share in shares for first in range(0, share, each)]


NODE_LABEL = "ray.io/node-id"  # every node has it
POLL_INTERVAL_S = 0.005  # 5 ms
NOT_FREE = ("NO_RESOURCES", "INFEASIBLE")  # Ray has tried to place the group


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes and how many ranks each takes, in rank order; and what holds the CPUs."""

    nodes: tuple[tuple[str, int], ...]
    group: PlacementGroup | None = None

    def release(self) -> None:
        """Give the CPUs back."""
        if self.group is not None:
            remove_placement_group(self.group)

    def of(self, workers: int) -> Reservation:
        """Itself, if it is for that many. Raises `ResourceError`."""
        most = sum(ranks for _, ranks in self.nodes)
        if most != workers:
            raise ResourceError(
                f"the placement has room for {counted(most, 'worker')}, not for {workers}: request "
                f"{most}, or reserve CPUs for {workers}"
            )
        return self


def alive_nodes() -> set[str]:
    """Ids of the nodes that Ray does not know to be lost."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def check_capacity(workers: int, cpus: float, strategy: str = "PACK") -> None:
    """Whether the cluster, empty and grown, could hold the workers. Raises `ResourceError`."""
    alive = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    growth = Growth.here()
    all_nodes = alive if growth is None else growth.grown(alive)
    rooms = [room(total, cpus) for total in all_nodes]
    most, where = sum(rooms), ""
    if strategy == "STRICT_PACK":
        most, where = max(rooms, default=0), " on one node (strategy='STRICT_PACK')"
    elif strategy == "STRICT_SPREAD":
        most, where = sum(r > 0 for r in rooms), ", one to a node (strategy='STRICT_SPREAD')"
    if workers > most:
        has = "has" if growth is None else "can grow to"
        raise ResourceError(
            f"{counted(workers, 'worker')} of {counted(cpus, 'CPU')} do not fit: the cluster {has} "
            f"{counted(sum(all_nodes), 'CPU')} on {counted(len(all_nodes), 'node')}, room for "
            f"{most}{where}. Ask for fewer, add nodes, or start Ray with more CPUs "
            f"(ray.init(num_cpus=...)) if ranks may "
            "share cores"
        )


def ask_for(
    ranks: Sequence[int],
    cpus: float,
    name: str,
    strategy: str,
    lifetime: str | None,
    nodes: Sequence[str] = (),
) -> PlacementGroup:
    """A placement group with a bundle for this many ranks each; not waited for.

    `nodes`: the node of each bundle, or ``"!in(...)"`` with those to avoid. A detached group
    outlives the actor that asked for it, which may be restarted by Ray: that actor has to give it
    back.
    """
    bundles = [{"CPU": count * cpus} for count in ranks]
    where = [{NODE_LABEL: node} for node in nodes] or None
    group: PlacementGroup = placement_group(
        bundles, strategy=strategy, name=name, lifetime=lifetime, bundle_label_selector=where
    )
    return group


def reserved(
    group: PlacementGroup, ranks: Sequence[int], timeout_s: float, *, patient: bool = True
) -> Reservation | None:
    """Wait for a group's CPUs, for this many ranks in each bundle.

    None if they do not become free in time, or, if not `patient`, are in use now; nothing stays
    reserved then.
    """
    try:
        table = _created(group, timeout_s, patient)
        if table is None:
            remove_placement_group(group)
            return None
        places = table["bundles_to_node_id"]
        counts: Counter[str] = Counter()
        for index, count in enumerate(ranks):
            counts[places[index]] += count
        return Reservation(tuple(counts.items()), group)
    except BaseException:
        remove_placement_group(group)
        raise


def _created(group: PlacementGroup, timeout_s: float, patient: bool) -> dict[str, Any] | None:
    deadline = time.monotonic() + timeout_s
    while True:
        table: dict[str, Any] = ray.util.placement_group_table(group)
        if table["state"] == "CREATED":
            return table
        left = deadline - time.monotonic()
        tried = table["stats"]["scheduling_state"] in NOT_FREE
        if left <= 0 or (tried and not patient):
            return None
        if patient and left >= 1:
            group.wait(int(left))  # it knows whole seconds only
        else:
            time.sleep(POLL_INTERVAL_S)


def not_free(workers: int, cpus: float, timeout_s: float) -> ResourceError:
    """The error for CPUs that did not become free in time."""
    free, growth = ray.available_resources().get("CPU", 0.0), Growth.here()
    advice = "Stop other work or wait for it"
    if growth is not None:
        advice = (
            f"The cluster may grow to {growth.nodes} nodes of {growth.cpus:g} CPUs: "
            "increase start_timeout_s to wait for new nodes"
        )
    return ResourceError(
        f"not enough free CPUs for {counted(workers, 'worker')} of {counted(cpus, 'CPU')} "
        f"after {timeout_s:.0f} s; free now: {counted(free, 'CPU')}. {_held(free)}{advice}"
    )


def _held(free: float) -> str:
    """Who has the CPUs: the largest reservations, and the rest."""
    held: list[tuple[float, str]] = []
    for about in ray.util.placement_group_table().values():
        if about["state"] == "CREATED":
            found = gang_and_run(about["name"])
            name = f"gang {found[0]}" if found else f"placement group {about['name']!r}"
            held.append((sum(b.get("CPU", 0.0) for b in about["bundles"].values()), name))
    others = ray.cluster_resources().get("CPU", 0.0) - free - sum(cpus for cpus, _ in held)
    held.append((others, "other tasks and actors"))
    shown = [f"{name} {cpus:g}" for cpus, name in sorted(held, reverse=True)[:SHOWN] if cpus > 0]
    return f"In use: {', '.join(shown)} (`alchemist status`). " if shown else ""


def within(group: PlacementGroup, bundles: Sequence[int], cpus: float) -> Reservation:
    """Bundles of a placement group that the caller has: as many ranks in each as it has CPUs for.

    Who made the group gives it back, not the gang.
    """
    if not isinstance(group, PlacementGroup):
        raise ValueError(f"group={group!r}: it must be a Ray placement group")
    table: dict[str, Any] = ray.util.placement_group_table(group)
    counts: Counter[str] = Counter()
    for index in bundles:
        ranks = room(table["bundles"][index].get("CPU", 0.0), cpus)
        counts[table["bundles_to_node_id"][index]] += ranks
    return Reservation(tuple(counts.items()))


def inherited(workers: int, cpus: float) -> Reservation:
    """The caller's own bundle: all workers on its node, within the CPUs it was given.

    Raises
    ------
    ResourceError
        Outside a Ray task or actor, or where it has not enough CPUs.
    """
    context = ray.get_runtime_context()
    if context.get_task_id() is None and context.get_actor_id() is None:
        raise ResourceError(
            "placement='inherit' starts the workers on the CPUs of the caller's Ray task or "
            "actor, but the caller is in neither: use placement='own'"
        )
    given = context.get_assigned_resources().get("CPU", 0.0)
    if given + 1e-9 < workers * cpus:
        raise ResourceError(
            f"placement='inherit': this task or actor has {counted(given, 'CPU')}, and "
            f"num_workers={workers} needs {workers * cpus:g}: give it "
            f"num_cpus={workers * cpus:g} or more"
        )
    return Reservation(((context.get_node_id(), workers),))
