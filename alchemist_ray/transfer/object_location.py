"""Where objects of the store lie, and the agents of those nodes."""

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
from alchemist_ray.runtime.driver import find_driver
from alchemist_ray.runtime.ray_calls import ask
from alchemist_ray.transfer.node_jobs import (
    OPENED,
    BlockDecoder,
    InspectJob,
    OpenBlock,
)

FIND_TIMEOUT_S = 60.0
# 256 MiB: of a matrix up to this size, this process itself opens and sends what lies on its node.
# In a larger one that would hold too much of the store, and map too much of the ranks' memory (it
# counts as this process's own), and the way to the agents costs little.
OWN_BYTES = 256 << 20
ASKED = 10_000  # objects in one question: what Ray puts into one message


class ObjectLocation(NamedTuple):
    """Where an object is, and how large it is there; 0 if Ray does not know."""

    node: str
    nbytes: int
    here: bool  # this process may do itself what else the node's agent does


def locate_objects(refs: Sequence[ray.ObjectRef]) -> list[ObjectLocation]:
    """The node that holds each block; small ones that no store holds count as this node's."""
    own = ray.get_runtime_context().get_node_id()
    unique = list(dict.fromkeys(refs))
    ray.wait(unique, num_returns=len(unique), fetch_local=False)
    places: dict[ray.ObjectRef, dict[str, Any]] = {}
    try:
        for some in _askable(unique):
            places |= get_object_locations(some, timeout_ms=int(FIND_TIMEOUT_S * 1000))
    except RayError as error:
        raise TransferError(f"cannot find out where the blocks are: {error}") from error
    held = []
    for ref in refs:
        place = places.get(ref, {})
        nodes = place.get("node_ids") or [own]
        node = own if own in nodes else sorted(nodes)[0]
        held.append(ObjectLocation(node, place.get("object_size") or 0, node == own))
    return held


def _askable(refs: Sequence[ray.ObjectRef]) -> Iterator[list[ray.ObjectRef]]:
    """Objects whose places can be asked for together: those of one owner, in one message.

    Ray 2.60 ends this process ("Promise already satisfied") where one owner answers before
    the next is asked: `CoreWorker::GetLocationFromOwner` counts the answers due as it asks.
    """
    owned: defaultdict[Any, list[ray.ObjectRef]] = defaultdict(list)
    for ref in refs:
        owned[ref.owner_address()].append(ref)
    for members in owned.values():
        for start in range(0, len(members), ASKED):
            yield members[start : start + ASKED]


def _by_node(held: Sequence[ObjectLocation]) -> Iterable[tuple[str, list[int]]]:
    members: defaultdict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(held):
        members[one.node].append(i)
    return members.items()


class BlockInfo(NamedTuple):
    """What a reader tells of an object, and what to send: its reference, or what was kept."""

    about: Any
    source: ray.ObjectRef | OpenBlock


def inspect_objects(
    refs: Sequence[ray.ObjectRef], labels: Sequence[str], reader: BlockDecoder
) -> list[BlockInfo]:
    """Look at every object, on the node that holds it.

    What lies on this node is looked at by this process: that opens it without a copy, and costs
    less than the way to the agent and back. Of a small matrix it stays open until it is sent: to
    open an object twice costs more than to send a small one.
    """
    held = locate_objects(refs)
    keeps = sum(one.nbytes or OPENED for one in held) <= OWN_BYTES
    jobs = {}
    for node, members in _by_node(held):
        named, sizes = (tuple(labels[i] for i in members), tuple(held[i].nbytes for i in members))
        jobs[node] = (InspectJob(reader, named, sizes), members)
    asked = {
        node: agent_of(node).run.remote(job, [refs[i] for i in members])
        for node, (job, members) in jobs.items()
        if not held[members[0]].here
    }
    found = [BlockInfo(None, ref) for ref in refs]
    for node, (job, members) in jobs.items():
        if node in asked:
            for i, about in zip(members, answer_of(asked[node]), strict=True):
                found[i] = BlockInfo(about, refs[i])
            continue
        opened = job.opened([refs[i] for i in members])
        for i, (about, kept) in zip(members, opened, strict=True):
            found[i] = BlockInfo(about, kept if keeps else refs[i])
    return found


_agents: dict[str, ActorHandle] = {}  # an actor keeps its handle through restarts


def agent_of(node: str) -> Any:
    """The standing agent of a node."""
    if node not in _agents:
        ((_agents[node], _),) = ask(find_driver().agents.remote([node]), timeout_s=120)
    return _agents[node]


def answer_of(ref: Any) -> Any:
    """What an agent's job returns. Raises `TransferError` if the node could not do it."""
    try:
        return ask(ref)
    except RayError as error:
        _agents.clear()  # the next transfer asks the Driver who there is
        # Ray has taken its time to tell: the gang's own end would be known by now.
        raise TransferError(
            f"a node could not read or send its blocks: {error}", cause=NODE_FAILED
        ) from error
