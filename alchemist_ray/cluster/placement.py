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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from alchemist_ray.attached.options import RankResources
from alchemist_ray.cluster.actors import gang_and_run
from alchemist_ray.errors import ResourceError
from alchemist_ray.plural import counted

MOST_WAITING = 256  # bundles of a gang whose CPUs are not free yet
SHOWN = 5  # holders of CPUs in an error
VARIABLE = "ALCHEMIST_GROWS_TO"  # "8x4", "8x4x1": at most 8 nodes of 4 CPUs (and 1 GPU) each
Resources = Mapping[str, float]  # of a node, as Ray names them


@dataclass(frozen=True, slots=True)
class Growth:
    """The largest cluster that an autoscaler may make, without nodes that have no CPUs."""

    nodes: int
    cpus: float
    gpus: float = 0.0

    @classmethod
    def here(cls) -> Growth | None:
        """From the environment; None for a cluster of fixed size. Raises `ResourceError`."""
        text = os.environ.get(VARIABLE, "")
        if not text:
            return None
        found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)(?:x(\d+))?", text)
        if found is None:
            raise ResourceError(
                f"{VARIABLE}={text!r}: it must be the maximum number of nodes, the CPUs of each "
                "and, if they have some, the GPUs of each, as in 8x4 or 8x4x1"
            )
        return cls(int(found[1]), float(found[2]), float(found[3] or 0))

    @property
    def node(self) -> Resources:
        """Of a future node."""
        return {"CPU": self.cpus, "GPU": self.gpus}

    def grown(self, nodes: Sequence[Resources]) -> list[Resources]:
        """The present nodes (without those that have no CPUs), and future ones."""
        there = [node for node in nodes if node.get("CPU", 0.0) > 0]
        return there + [self.node] * max(0, self.nodes - len(there))


def divisions(
    workers: int, each: RankResources, strategy: str, avoided: Collection[str] = ()
) -> tuple[list[int], list[int]]:
    """Ranks of each bundle: of a group that is placed at once, and of one that is queued.

    The first is for the CPUs that are free now, with a bundle per node. Where they are not enough,
    or other work takes them first, smaller bundles wait: CPUs may become free on any nodes.

    Parameters
    ----------
    workers : int
    each : RankResources
    strategy : str
        One of `attached.options.STRATEGIES`.
    avoided : collection of str
        Nodes that are not used.
    """
    if strategy == "STRICT_PACK":
        return [workers], [workers]
    if strategy == "STRICT_SPREAD":
        return [1] * workers, [1] * workers
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoided]
    growth = Growth.here()
    if growth is None and len(nodes) == 1:
        return [workers], [workers]
    present = [node["Resources"] for node in nodes]
    free = available_resources_per_node()
    unused = [each.room(free.get(node["NodeID"], {})) for node in nodes]
    future = [each.room(node) for node in (present if growth is None else growth.grown(present))]
    now, later = per_node(workers, strategy, unused), in_pieces(workers, strategy, future)
    return now or later, later


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
DEVICES_LIMIT_S = 60.0  # for Ray to start a worker in each bundle, and name its devices
DEVICE_VARIABLES = (  # of NVIDIA, AMD and Intel
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR",
)  # fmt: skip
NOT_FREE = ("NO_RESOURCES", "INFEASIBLE")  # Ray has tried to place the group


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes and how many ranks each takes, in rank order; and what holds the CPUs.

    `devices`: the GPUs of each rank, as the environment variables that make it see them.
    """

    nodes: tuple[tuple[str, int], ...]
    group: PlacementGroup | None = None
    devices: tuple[Mapping[str, str], ...] = field(default=(), kw_only=True)

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


def check_capacity(workers: int, each: RankResources, strategy: str = "PACK") -> None:
    """Whether the cluster, empty and grown, could hold the workers. Raises `ResourceError`."""
    alive: list[Resources] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    growth = Growth.here()
    all_nodes = alive if growth is None else growth.grown(alive)
    rooms = [each.room(node) for node in all_nodes]
    most, where = sum(rooms), ""
    if strategy == "STRICT_PACK":
        most, where = max(rooms, default=0), " on one node (strategy='STRICT_PACK')"
    elif strategy == "STRICT_SPREAD":
        most, where = sum(r > 0 for r in rooms), ", one to a node (strategy='STRICT_SPREAD')"
    if workers > most:
        has = "has" if growth is None else "can grow to"
        raise ResourceError(
            f"{counted(workers, 'worker')} of {each} do not fit: the cluster {has} "
            f"{_total(all_nodes, each)} on {counted(len(all_nodes), 'node')}, room for "
            f"{most}{where}. Ask for fewer, add nodes, or start Ray with more CPUs "
            f"(ray.init(num_cpus=...)) if ranks may "
            "share cores"
        )


def _total(nodes: Sequence[Resources], each: RankResources) -> str:
    """The CPUs of some nodes, and the GPUs if ranks need them, in words."""
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in each.times(1)}
    return " and ".join(counted(amount, name) for name, amount in total.items())


@dataclass(frozen=True, slots=True)
class Bundles:
    """The bundles of a placement group.

    Attributes
    ----------
    ranks : sequence of int
        How many each has room for.
    each : RankResources
    strategy : str
    nodes : sequence of str
        The node of each bundle, or ``"!in(...)"`` with those to avoid. Empty: any.
    """

    ranks: Sequence[int]
    each: RankResources
    strategy: str
    nodes: Sequence[str] = ()


def ask_for(bundles: Bundles, name: str, lifetime: str | None) -> PlacementGroup:
    """A placement group; not waited for.

    A detached group outlives the actor that asked for it, which may be restarted by Ray: that
    actor has to give it back.
    """
    group: PlacementGroup = placement_group(
        [bundles.each.times(count) for count in bundles.ranks],
        strategy=bundles.strategy,
        name=name,
        lifetime=lifetime,
        bundle_label_selector=[{NODE_LABEL: node} for node in bundles.nodes] or None,
    )
    return group


def reserved(
    group: PlacementGroup,
    ranks: Sequence[int],
    each: RankResources,
    timeout_s: float,
    *,
    patient: bool = True,
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
        return _by_node(table, dict(enumerate(ranks)), group, each)
    except BaseException:
        remove_placement_group(group)
        raise


def _by_node(
    table: dict[str, Any], ranks: Mapping[int, int], group: PlacementGroup, each: RankResources
) -> Reservation:
    """The ranks of some bundles, and their GPUs."""
    counts: Counter[str] = Counter()
    devices: dict[str, list[Mapping[str, str]]] = {}
    seen = _devices(group, ranks, each) if each.gpus else [[] for _ in ranks]
    for (index, count), of_ranks in zip(ranks.items(), seen, strict=True):
        node = table["bundles_to_node_id"][index]
        counts[node] += count
        devices.setdefault(node, []).extend(of_ranks)
    in_order = tuple(device for node in counts for device in devices[node])
    return Reservation(tuple(counts.items()), group, devices=in_order)


def _devices(
    group: PlacementGroup, ranks: Mapping[int, int], each: RankResources
) -> list[list[Mapping[str, str]]]:
    """The GPUs of each rank in each bundle, which a task in the bundle is given by Ray."""

    @ray.remote(num_cpus=0, max_retries=3)
    def given() -> dict[str, str]:
        return visible_devices()

    asked = []
    for index, count in ranks.items():
        here = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        asked.append(given.options(num_gpus=count * each.gpus, scheduling_strategy=here).remote())
    answers: list[dict[str, str]] = ray.get(asked, timeout=DEVICES_LIMIT_S)
    return [
        divided(seen, count, each.gpus) for seen, count in zip(answers, ranks.values(), strict=True)
    ]


def visible_devices() -> dict[str, str]:
    """The variables by which Ray tells this task or actor its accelerators."""
    return {name: os.environ[name] for name in DEVICE_VARIABLES if os.environ.get(name)}


def divided(seen: Mapping[str, str], ranks: int, gpus: float) -> list[Mapping[str, str]]:
    """Whose GPUs are whose: the devices of ``seen`` for each of some ranks.

    Raises
    ------
    ResourceError
        If Ray has named fewer devices than were reserved.
    """
    found: list[Mapping[str, str]] = []
    for rank in range(ranks):
        first, last = rank * gpus, (rank + 1) * gpus
        chosen = slice(int(first + 1e-9), max(int(first + 1e-9) + 1, int(last + 1e-9)))
        mine = {name: text.split(",")[chosen] for name, text in seen.items()}
        if not mine or not all(mine.values()):
            raise ResourceError(
                f"{counted(ranks, 'rank')} with {gpus:g} GPUs each were reserved, and Ray has "
                f"named these devices: {dict(seen) or 'none'}. `alchemist doctor` shows each node's"
            )
        found.append({name: ",".join(ids) for name, ids in mine.items()})
    return found


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


def not_free(workers: int, each: RankResources, timeout_s: float) -> ResourceError:
    """The error for CPUs, or GPUs, that did not become free in time."""
    free, growth = ray.available_resources(), Growth.here()
    advice = "Stop other work or wait for it"
    if growth is not None:
        advice = (
            f"The cluster may grow to {growth.nodes} nodes of {growth.cpus:g} CPUs: "
            "increase start_timeout_s to wait for new nodes"
        )
    scarce = "GPU" if each.gpus and free.get("GPU", 0.0) < workers * each.gpus else "CPU"
    return ResourceError(
        f"not enough free {scarce}s for {counted(workers, 'worker')} of {each} "
        f"after {timeout_s:.0f} s; free now: {_total([free], each)}. "
        f"{_held(free, scarce)}{advice}"
    )


def _held(free: Resources, scarce: str) -> str:
    """The holders of the CPUs (or GPUs): the largest reservations, and the rest."""
    held: list[tuple[float, str]] = []
    for about in ray.util.placement_group_table().values():
        if about["state"] == "CREATED":
            found = gang_and_run(about["name"])
            name = f"gang {found[0]}" if found else f"placement group {about['name']!r}"
            held.append((sum(b.get(scarce, 0.0) for b in about["bundles"].values()), name))
    used = ray.cluster_resources().get(scarce, 0.0) - free.get(scarce, 0.0)
    held.append((used - sum(amount for amount, _ in held), "other tasks and actors"))
    shown = [f"{name} {many:g}" for many, name in sorted(held, reverse=True)[:SHOWN] if many > 0]
    return f"In use: {', '.join(shown)} (`alchemist status`). " if shown else ""


def within(
    group: PlacementGroup, bundles: Sequence[int], cpus: float, gpus: float = 0.0
) -> Reservation:
    """Bundles of a placement group that the caller has: as many ranks in each as it has room for.

    Parameters
    ----------
    group : PlacementGroup
        Who made it gives it back, not the gang.
    bundles : sequence of int
    cpus, gpus : float
        Of each rank.

    Raises
    ------
    ValueError
        If it is not a placement group.
    ResourceError
        If Ray does not name the bundles' GPUs.
    """
    if not isinstance(group, PlacementGroup):
        raise ValueError(f"group={group!r}: it must be a Ray placement group")
    each = RankResources(cpus, gpus)
    table: dict[str, Any] = ray.util.placement_group_table(group)
    ranks = {index: each.room(table["bundles"][index]) for index in bundles}
    return replace(_by_node(table, ranks, group, each), group=None)


def inherited(workers: int, each: RankResources) -> Reservation:
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
    given, needed = context.get_assigned_resources(), each.times(workers)
    if each.room(given) < workers:
        raise ResourceError(
            f"placement='inherit': this task or actor has {_total([given], each)}, and "
            f"num_workers={workers} needs {' and '.join(f'{n:g}' for n in needed.values())}: give "
            f"it {', '.join(f'num_{name.lower()}s={n:g}' for name, n in needed.items())} or more"
        )
    devices = divided(visible_devices(), workers, each.gpus) if each.gpus else []
    return Reservation(((context.get_node_id(), workers),), devices=tuple(devices))
