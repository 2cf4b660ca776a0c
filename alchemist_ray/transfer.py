"""Blocks that lie in the object store: sent from the nodes that hold them, not through the user.

Each node's agent looks at its own blocks (their shapes are not known elsewhere),
then cuts and sends them: on the gang's nodes straight into the ranks' memory, on
others over one stream per rank. The user's process sees object refs only.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental import get_object_locations

from alchemist_ray.blocks import LookJob, Origin, SendJob
from alchemist_ray.driver import find_driver
from alchemist_ray.errors import (
    DtypeError,
    IncompleteMatrixError,
    ShapeError,
    TransferError,
)
from alchemist_ray.link import ask
from mpi_workers.client import Progress, RankTimes, Target
from mpi_workers.layout import Shape

if TYPE_CHECKING:
    from alchemist_ray.gang import GangClient

BATCH_BYTES = 256 << 20  # 256 MiB: a node reports so often how far it is
FIND_TIMEOUT_S = 60.0
ASKED = 10_000  # objects in one question: what Ray puts into one message
NODE_FAILED = "a node could not send"


class Held(NamedTuple):
    """Where an object is, and how large it is there; 0 if Ray does not know."""

    node: str
    nbytes: int


class BlocksPlan:
    """A matrix that lies in pieces in the object store."""

    def __init__(
        self,
        refs: Sequence[ray.ObjectRef],
        origins: Sequence[Origin],
        shapes: Sequence[Shape],
        dtype: np.dtype[Any],
        held: Sequence[Held],
    ) -> None:
        self._refs = refs
        self._origins = origins
        self._shapes = shapes
        self._held = held
        self.dtype = dtype
        self.shape: Shape = (
            max(r + m for (r, _), (m, _) in zip(origins, shapes, strict=True)),
            max(c + n for (_, c), (_, n) in zip(origins, shapes, strict=True)),
        )
        check_tiling(self.shape, origins, shapes)

    @classmethod
    def look(cls, blocks: Sequence[Any], wanted: Any) -> BlocksPlan:
        """Find the blocks, look at them where they are, and check that they make a matrix."""
        from alchemist_ray.sources import chosen_dtype  # noqa: PLC0415

        refs, origins = _checked(blocks)
        held = holders(refs)
        found = looked(refs, held, lambda some: LookJob(tuple(held[i].nbytes for i in some)))
        shapes: list[Shape] = []
        dtypes = set()
        for i, (shape, dtype) in enumerate(found):
            if dtype == "object":
                raise DtypeError(f"block {i} is not an array of numbers")
            if len(shape) not in (1, 2) or 0 in shape:
                raise ShapeError(f"block {i} has shape {shape}: it must be 2-D and not empty")
            shapes.append((shape[0], shape[1] if len(shape) == 2 else 1))
            dtypes.add(np.dtype(dtype))
        common = np.result_type(*dtypes) if all(d.kind in "biufc" for d in dtypes) else None
        if common is None:
            raise DtypeError(f"blocks of dtypes {', '.join(sorted(map(str, dtypes)))}")
        return cls(refs, origins, shapes, chosen_dtype(common, wanted), held)

    def provenance(self) -> dict[str, Any]:
        return {
            "from": "object store",
            "blocks": [
                [ref.hex(), *origin] for ref, origin in zip(self._refs, self._origins, strict=True)
            ],
        }

    def send(
        self, client: GangClient, target: Target, progress: Progress | None
    ) -> dict[int, RankTimes]:
        """One task per node at a time, a batch of its blocks each."""
        batches = {node: self._batches(members) for node, members in by_node(self._held)}
        running: dict[Any, tuple[str, int]] = {}
        times: dict[int, RankTimes] = {}

        def start(node: str) -> None:
            if not batches[node]:
                return
            members = batches[node].pop()
            job = SendJob(
                client.run_name,
                client.doors,
                target,
                tuple(self._origins[i] for i in members),
            )
            ref = agent_of(node).run.remote(job, [self._refs[i] for i in members])
            running[ref] = (node, sum(self._nbytes(i) for i in members))

        for node in batches:
            start(node)
        while running:
            done, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            if not done:
                client.request({"op": "list_workers"})  # raises if the gang is lost
                continue
            node, nbytes = running.pop(done[0])
            for rank, part in answer_of(done[0]).items():
                times.setdefault(rank, RankTimes(rank, part.route)).add(part)
            if progress is not None:
                progress(nbytes)
            start(node)
        return times

    def _nbytes(self, i: int) -> int:
        m, n = self._shapes[i]
        return m * n * self.dtype.itemsize

    def _batches(self, members: Iterable[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        size = 0
        for i in members:
            if size > BATCH_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(i)
            size += self._nbytes(i)
        return batches[::-1]


def _checked(blocks: Sequence[Any]) -> tuple[list[ray.ObjectRef], list[Origin]]:
    refs, origins = [], []
    for i, block in enumerate(blocks):
        try:
            ref, row0, col0 = block
            origin = (int(row0), int(col0))
        except (TypeError, ValueError):
            raise ShapeError(f"block {i} is {block!r}, not (ObjectRef, row, column)") from None
        if not isinstance(ref, ray.ObjectRef) or min(origin) < 0:
            raise ShapeError(f"block {i} is {block!r}, not (ObjectRef, row >= 0, column >= 0)")
        refs.append(ref)
        origins.append(origin)
    return refs, origins


def holders(refs: Sequence[ray.ObjectRef]) -> list[Held]:
    """The node that holds each block; small ones that no store holds count as this node's."""
    here = ray.get_runtime_context().get_node_id()
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
        nodes = place.get("node_ids") or [here]
        node = here if here in nodes else sorted(nodes)[0]
        held.append(Held(node, place.get("object_size") or 0))
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


def by_node(held: Sequence[Held]) -> Iterable[tuple[str, list[int]]]:
    members: defaultdict[str, list[int]] = defaultdict(list)
    for i, (node, _) in enumerate(held):
        members[node].append(i)
    return members.items()


def looked(
    refs: Sequence[ray.ObjectRef], held: Sequence[Held], job_for: Callable[[list[int]], Any]
) -> list[Any]:
    """What is to be known of every object, told by jobs on the nodes that hold them.

    What lies on this node is looked at by this process: that opens it without a copy, and costs
    less than the way to the agent and back.
    """
    jobs = {node: (job_for(members), members) for node, members in by_node(held)}
    here = ray.get_runtime_context().get_node_id()
    asked = {
        node: agent_of(node).run.remote(job, [refs[i] for i in members])
        for node, (job, members) in jobs.items()
        if node != here
    }
    found: list[Any] = [None] * len(refs)
    for node, (job, members) in jobs.items():
        with _ray_told():
            mine = node == here
            answers = job.run([refs[i] for i in members]) if mine else ask(asked[node])
        for i, answer in zip(members, answers, strict=True):
            found[i] = answer
    return found


_agents: dict[str, ActorHandle] = {}  # an actor keeps its handle through restarts


def agent_of(node: str) -> Any:
    """The standing agent of a node."""
    if node not in _agents:
        ((_agents[node], _),) = ask(find_driver().agents.remote([node]), timeout_s=120)
    return _agents[node]


def answer_of(ref: Any) -> Any:
    """What an agent's job returns. Raises `TransferError` if the node could not do it."""
    with _ray_told():
        return ask(ref)


@contextlib.contextmanager
def _ray_told() -> Iterator[None]:
    """Makes a `TransferError` of what Ray says of objects and agents."""
    try:
        yield
    except RayError as error:
        _agents.clear()  # the next transfer asks the Driver who there is
        # Ray has taken its time to tell: the gang's own end would be known by now.
        raise TransferError(
            f"a node could not read or send its blocks: {error}", cause=NODE_FAILED
        ) from error


def check_tiling(shape: Shape, origins: Sequence[Origin], shapes: Sequence[Shape]) -> None:
    """Whether blocks cover a matrix exactly once. Raises `IncompleteMatrixError`.

    Sweeps over bands of rows in which the same blocks lie: in each, the blocks'
    columns must follow each other without gap or overlap.
    """
    ends = {r + m for (r, _), (m, _) in zip(origins, shapes, strict=True)}
    cuts = sorted(ends | {r for r, _ in origins})
    if cuts[0] != 0:
        raise IncompleteMatrixError(f"rows 0 to {cuts[0]} are in no block")
    index = {row: k for k, row in enumerate(cuts)}
    bands: list[list[tuple[int, int, int]]] = [[] for _ in cuts[:-1]]
    for i, ((r, c), (m, n)) in enumerate(zip(origins, shapes, strict=True)):
        for k in range(index[r], index[r + m]):
            bands[k].append((c, c + n, i))
    for k, band in enumerate(bands):
        column = 0
        previous = None
        for start, stop, i in sorted(band):
            if start > column:
                raise IncompleteMatrixError(
                    f"rows {cuts[k]} to {cuts[k + 1]}, columns {column} to {start} are in no block"
                )
            if start < column:
                raise IncompleteMatrixError(
                    f"blocks {previous} and {i} overlap in row {cuts[k]}, column {start}"
                )
            column, previous = stop, i
        if column != shape[1]:
            raise IncompleteMatrixError(
                f"rows {cuts[k]} to {cuts[k + 1]}, columns {column} to {shape[1]} are in no block"
            )
