"""Locates objects of the store, and inspects them on the nodes that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental import get_object_locations

from alchemist_ray.errors import TransferError
from alchemist_ray.gang.connection import NODE_FAILED
from alchemist_ray.runtime.cluster.actors import ask
from alchemist_ray.runtime.cluster.ray_connection import connection_id
from alchemist_ray.runtime.driver import find_driver
from alchemist_ray.transfer.node_jobs import (
    OPENED,
    BlockDecoder,
    InspectJob,
    OpenBlock,
)

FIND_TIMEOUT_S = 60.0


# 256 MiB: this process opens and sends the local blocks of a matrix up to this size. For a larger
# one it would hold too much of the store and map too much of the ranks' memory (which counts as
# its own), and calling the agents costs little in comparison.
OWN_BYTES = 256 << 20


QUERY_OBJECTS = 10_000  # objects per query: as many as Ray puts into one message


class ObjectLocation(NamedTuple):
    """The node that holds an object, and its size in the store; 0 if Ray does not know it."""

    node: str
    nbytes: int
    here: bool  # on this process's node


def locate_objects(refs: Sequence[ray.ObjectRef]) -> list[ObjectLocation]:
    """The node that holds each object; objects that no store holds count as local."""
    own = ray.get_runtime_context().get_node_id()
    unique = list(dict.fromkeys(refs))
    ray.wait(unique, num_returns=len(unique), fetch_local=False)
    places: dict[ray.ObjectRef, dict[str, Any]] = {}
    try:
        for some in _queries(unique):
            places |= get_object_locations(some, timeout_ms=int(FIND_TIMEOUT_S * 1000))
    except RayError as error:
        raise TransferError(f"cannot locate the blocks: {error}") from error
    locations = []
    for ref in refs:
        place = places.get(ref, {})
        nodes = place.get("node_ids") or [own]
        node = own if own in nodes else sorted(nodes)[0]
        locations.append(ObjectLocation(node, place.get("object_size") or 0, node == own))
    return locations


def _queries(refs: Sequence[ray.ObjectRef]) -> Iterator[list[ray.ObjectRef]]:
    """Groups of objects whose locations can be queried together: those of one owner.

    Ray 2.60 ends this process ("Promise already satisfied") if one owner answers before
    the next is queried: `CoreWorker::GetLocationFromOwner` counts the answers due as it asks.
    """
    owned: defaultdict[Any, list[ray.ObjectRef]] = defaultdict(list)
    for ref in refs:
        owned[ref.owner_address()].append(ref)
    for members in owned.values():
        for start in range(0, len(members), QUERY_OBJECTS):
            yield members[start : start + QUERY_OBJECTS]


def _by_node(locations: Sequence[ObjectLocation]) -> Iterable[tuple[str, list[int]]]:
    members: defaultdict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(locations):
        members[one.node].append(i)
    return members.items()


class BlockInfo(NamedTuple):
    """The decoder's facts about an object, and the source to send: its reference or its arrays."""

    about: Any
    source: ray.ObjectRef | OpenBlock


def inspect_objects(
    refs: Sequence[ray.ObjectRef], labels: Sequence[str], decoder: BlockDecoder
) -> list[BlockInfo]:
    """Inspect every object on the node that holds it.

    This process inspects local objects: it opens them without a copy, which costs less than a
    call of the agent. Blocks of a small matrix stay open until they are sent, as opening an
    object twice costs more than sending a small one.
    """
    locations = locate_objects(refs)
    keeps = sum(one.nbytes or OPENED for one in locations) <= OWN_BYTES
    jobs = {}
    for node, members in _by_node(locations):
        named, sizes = (
            tuple(labels[i] for i in members),
            tuple(locations[i].nbytes for i in members),
        )
        jobs[node] = (InspectJob(decoder, named, sizes), members)
    answers = {
        node: agent_of(node).run.remote(job, [refs[i] for i in members])
        for node, (job, members) in jobs.items()
        if not locations[members[0]].here
    }
    found = [BlockInfo(None, ref) for ref in refs]
    for node, (job, members) in jobs.items():
        if node in answers:
            for i, about in zip(members, answer_of(answers[node], node), strict=True):
                found[i] = BlockInfo(about, refs[i])
            continue
        opened = job.opened([refs[i] for i in members])
        for i, (about, kept) in zip(members, opened, strict=True):
            found[i] = BlockInfo(about, kept if keeps else refs[i])
    return found


# By connection and node. The handle of an actor stays valid through restarts.
_agents: dict[tuple[tuple[str, str], str], ActorHandle] = {}


def agent_of(node: str) -> Any:
    """The agent of a node."""
    key = connection_id(), node
    if key not in _agents:
        ((_agents[key], _),) = ask(find_driver().agents.remote([node]), timeout_s=120)
    return _agents[key]


def answer_of(ref: Any, node: str) -> Any:
    """The result of an agent's job. Raises `TransferError` if the node could not do it."""
    try:
        return ask(ref)
    except RayError as error:
        _agents.clear()  # the next transfer asks the Driver for the agents
        # Ray reports this late: the end of the gang would be known by now.
        hosts = {one["NodeID"]: one["NodeManagerHostname"] for one in ray.nodes()}
        raise TransferError(
            f"node {hosts.get(node, node)} could not read or send its blocks: {error}",
            cause=NODE_FAILED,
        ) from error
