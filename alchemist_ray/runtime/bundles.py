"""Divides the ranks of a gang among the bundles of a placement group.

Ray's time for a placement group grows with the square of the bundles that a node takes: 2048 on one
node take 7 s. A bundle per node, with the CPUs of all its ranks, takes some milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import ray
from ray._private.state import available_resources_per_node

from alchemist_ray.runtime.autoscaling import Growth

MOST_WAITING = 256  # bundles of a gang whose CPUs are not free yet


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
        See `placement.STRATEGIES`.
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
