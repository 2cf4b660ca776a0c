"""Blocks in the object store: located, inspected, and sent from the nodes that hold them.

Agents send the blocks of their nodes, several per job, each block as soon as it exists. Of a matrix
up to 256 MiB this process sends its local blocks, which saves a call of the agent. The task that
makes a block never sends it: Ray may run a task twice, and a block that is written twice would
break the matrix.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental import get_object_locations

from alchemist_ray.attached.connection import NODE_FAILED, GangConnection
from alchemist_ray.cluster.actors import ask
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.cluster.node_jobs import (
    OPENED_NBYTES,
    ArrayDecoder,
    BlockDecoder,
    InspectJob,
    OpenBlock,
    Origin,
    SendJob,
    SourceBlock,
    write,
)
from alchemist_ray.cluster.ray_connection import connection_id
from alchemist_ray.dtypes import chosen_dtype, common_dtype
from alchemist_ray.errors import IncompleteMatrixError, ShapeError, TransferError
from mpi_workers.columns.missing import ERROR, Missing
from mpi_workers.data.description import NodeTimes, TransferTarget, add_times
from mpi_workers.data.transfers import Progress
from mpi_workers.matrix.layout import MAX_AXES, ArrayShape, Shape, stored_shape


class ObjectStoreSource:
    """A matrix, or an array of more axes, that lies in pieces in the object store."""

    columns: Sequence[str] = ()

    def __init__(
        self,
        refs: Sequence[ray.ObjectRef],
        sources: Sequence[Any],
        origins: Sequence[Origin],
        array_shapes: Sequence[ArrayShape],
        dtype: np.dtype[Any],
        reader: ArrayDecoder,
    ) -> None:
        self._refs = refs
        self._reader = reader
        self._sources = sources  # of the blocks
        self._origins = origins
        self._shapes = shapes = [stored_shape(shape) for shape in array_shapes]
        self.dtype = dtype
        self.shape: Shape = (
            max(r + m for (r, _), (m, _) in zip(origins, shapes, strict=True)),
            max(c + n for (_, c), (_, n) in zip(origins, shapes, strict=True)),
        )
        self.array_shape: ArrayShape = self.shape
        if max(map(len, array_shapes)) > 2:
            self.array_shape = (self.shape[0], *_common_inner(origins, array_shapes))
        check_tiling(self.shape, origins, shapes)

    @classmethod
    def inspect(cls, blocks: Sequence[Any], wanted: Any, missing: Missing) -> ObjectStoreSource:
        """Find the blocks, look at them where they are, and check that they make a matrix."""
        refs, origins = _checked(blocks)
        reader = ArrayDecoder(MAX_AXES, missing)
        found = inspect_objects(refs, [_label(i) for i in range(len(refs))], reader)
        shapes: list[ArrayShape] = [shape for (shape, _), _ in found]
        for i, shape in enumerate(shapes):
            if 0 in shape:
                raise ShapeError(f"{_label(i)} has shape {shape}: it must not be empty")
        dtype = common_dtype({np.dtype(dtype) for (_, dtype), _ in found})
        sources = [source for _, source in found]
        return cls(refs, sources, origins, shapes, chosen_dtype(dtype, wanted), reader)

    def provenance(self) -> dict[str, Any]:
        return {
            "from": "object store",
            "blocks": [
                [ref.hex(), *origin] for ref, origin in zip(self._refs, self._origins, strict=True)
            ],
        }

    def kept(self) -> Any:
        """The blocks: data that can be sent again, if nothing in them is replaced."""
        if self._reader.missing != ERROR:
            return None
        return [(ref, *origin) for ref, origin in zip(self._refs, self._origins, strict=True)]

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Every block from the node that holds it."""
        sources, self._sources = self._sources, ()  # open blocks are released as they are sent
        with BlockSender(connection, target, self._reader, progress) as sender:
            for i, source in enumerate(sources):
                sender.add(SourceBlock(source, self._origins[i], self._shapes[i], _label(i)))
        return sender.times


def _label(i: int) -> str:
    return f"block {i}"


def _common_inner(origins: Sequence[Origin], shapes: Sequence[ArrayShape]) -> ArrayShape:
    """The lengths of all axes but the first, of blocks of an array of three axes or more."""
    for i, ((_, col), shape) in enumerate(zip(origins, shapes, strict=True)):
        if col or shape[1:] != shapes[0][1:]:
            raise ShapeError(
                f"{_label(i)} has shape {shape} and column {col}, and {_label(0)} has shape "
                f"{shapes[0]}: blocks of three axes or more are (ObjectRef, first index, 0), and "
                "differ only in the length of the first axis"
            )
    return shapes[0][1:]


def _checked(blocks: Sequence[Any]) -> tuple[list[ray.ObjectRef], list[Origin]]:
    refs, origins = [], []
    for i, block in enumerate(blocks):
        try:
            ref, row0, col0 = block
            origin = (operator.index(row0), operator.index(col0))
        except (TypeError, ValueError):
            ref, origin = None, (0, 0)
        if not isinstance(ref, ray.ObjectRef) or min(origin) < 0:
            raise ShapeError(f"block {i} is {block!r}, not (ObjectRef, row >= 0, column >= 0)")
        refs.append(ref)
        origins.append(origin)
    return refs, origins


def check_tiling(shape: Shape, origins: Sequence[Origin], shapes: Sequence[Shape]) -> None:
    """Whether blocks cover a matrix exactly once. Raises `IncompleteMatrixError`.

    Sweeps over bands of rows in which the same blocks lie: in each, the blocks'
    columns must follow each other without gap or overlap.
    """
    ends = {r + m for (r, _), (m, _) in zip(origins, shapes, strict=True)}
    cuts = sorted(ends | {r for r, _ in origins})
    if cuts[0] != 0:
        raise _gap(0, cuts[0], 0, shape[1])
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
                raise _gap(cuts[k], cuts[k + 1], column, start)
            if start < column:
                raise IncompleteMatrixError(
                    f"blocks {previous} and {i} overlap in row {cuts[k]}, column {start}: send "
                    "each element once"
                )
            column, previous = stop, i
        if column != shape[1]:
            raise _gap(cuts[k], cuts[k + 1], column, shape[1])


def _gap(row0: int, row1: int, col0: int, col1: int) -> IncompleteMatrixError:
    return IncompleteMatrixError(
        f"rows {row0} to {row1}, columns {col0} to {col1} are in no block: send blocks that cover "
        "the matrix, with zeros where there are no data"
    )


def inspect(
    data: Any, dtype: Any, missing: Missing, connection: GangConnection
) -> ObjectStoreSource:
    """A source for a list of (ObjectRef, first row, first column)."""
    return ObjectStoreSource.inspect(data, dtype, missing)


# --- where blocks are ---

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


def inspect_objects(
    refs: Sequence[ray.ObjectRef], labels: Sequence[str], decoder: BlockDecoder
) -> list[tuple[Any, ray.ObjectRef | OpenBlock]]:
    """Inspect every object on the node that holds it.

    Returns the decoder's facts about each, and the source to send: its reference or its arrays.

    This process inspects local objects: it opens them without a copy, which costs less than a
    call of the agent. Blocks of a small matrix stay open until they are sent, as opening an
    object twice costs more than sending a small one.
    """
    locations = locate_objects(refs)
    keeps = sum(one.nbytes or OPENED_NBYTES for one in locations) <= OWN_BYTES
    by_node: defaultdict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(locations):
        by_node[one.node].append(i)
    jobs = {}
    for node, members in by_node.items():
        sizes = tuple(locations[i].nbytes for i in members)
        jobs[node] = InspectJob(decoder, tuple(labels[i] for i in members), sizes), members
    answers = {
        node: agent_of(node).run.remote(job, [refs[i] for i in members])
        for node, (job, members) in jobs.items()
        if not locations[members[0]].here
    }
    found: list[tuple[Any, ray.ObjectRef | OpenBlock]] = [(None, ref) for ref in refs]
    for node, (job, members) in jobs.items():
        if node in answers:
            for i, about in zip(members, answer_of(answers[node], node), strict=True):
                found[i] = about, refs[i]
            continue
        opened = job.opened([refs[i] for i in members])
        for i, (about, kept) in zip(members, opened, strict=True):
            found[i] = about, kept if keeps else refs[i]
    return found


# By connection and node. The handle of an actor stays valid through restarts.
_agents: dict[tuple[tuple[str, str], str], ActorHandle] = {}


def agent_of(node: str) -> Any:
    """The agent of a node."""
    key = connection_id(), node
    if key not in _agents:
        ((_agents[key], _),) = ask(find_driver().agents.remote([node]), timeout_s=120)
    return _agents[key]


def wait_for_jobs(running: Iterable[Any]) -> None:
    """Wait for jobs after an error: they write into memory that is freed next."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for ref in running:
        with contextlib.suppress(Exception):
            ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))


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


# --- sending ---

JOB_BYTES = 64 << 20  # 64 MiB sent by one job; the store can free them afterwards
JOBS_PER_NODE = 2  # at a time: the next one waits when one ends
STOP_TIMEOUT_S = 2.0  # for running jobs after a transfer has failed


@dataclass(eq=False)
class BlockSender:
    """Sends blocks that exist, or that tasks are still computing.

    Attributes
    ----------
    connection : GangConnection
        The gang; it is pinged while nothing moves.
    target : TransferTarget
        The matrix.
    decoder : BlockDecoder
        Makes arrays of the objects.
    progress : callable(nbytes), optional
    in_flight : int
        Bytes that were added and have not arrived.
    times : dict of int to NodeTimes
        By node.

    Notes
    -----
    A context manager: at its end all blocks have been sent, or, after an error, no job runs any
    more. Not thread-safe, but different threads may call it one after the other.
    """

    connection: GangConnection
    target: TransferTarget
    decoder: BlockDecoder
    progress: Progress | None
    in_flight: int = 0
    times: dict[int, NodeTimes] = field(default_factory=dict)
    _computing: dict[Any, list[SourceBlock]] = field(default_factory=dict)  # by object
    _ready: dict[str, deque[SourceBlock]] = field(default_factory=dict)  # by node
    _local: deque[SourceBlock] = field(default_factory=deque)  # on this node, or open here
    _jobs: dict[Any, tuple[str, list[SourceBlock]]] = field(default_factory=dict)
    _running: Counter[str] = field(default_factory=Counter)  # jobs by node
    _over: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.ExitStack() as failed:
            failed.callback(self._stop)
            if kind is None:
                while self._computing or self._jobs or self._local or any(self._ready.values()):
                    self.step(1.0)
                failed.pop_all()

    def add(self, block: SourceBlock) -> None:
        """Take a block; later calls send it."""
        self.in_flight += self._nbytes(block)
        if isinstance(block.source, ray.ObjectRef):
            self._computing.setdefault(block.source, []).append(block)
        else:
            self._local.append(block)

    def down_to(self, nbytes: int) -> None:
        """Send until no more than `nbytes` are in flight. Raises the error of a transfer."""
        while self.in_flight > nbytes:
            self.step(1.0)

    def _stop(self) -> None:
        """Stop after an error: wait for the jobs that write now.

        Submitted tasks run to their end, and their results are dropped. Cancelling them is not
        safe: Ray 2.60 aborts this process if a task ends at that moment ("Tried to complete
        task that was not pending").
        """
        self._over = True
        making, jobs = list(self._computing), list(self._jobs)
        wait_for_jobs(jobs)
        for ref in self._ready_now(making, 0.0):  # Ray prints errors that are not retrieved
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=0)

    def step(self, timeout_s: float) -> None:
        """Find blocks that are ready, start jobs, and send a part of the local blocks.

        Waits for something to do if there is nothing.
        """
        if self._over:
            raise TransferError(
                "the transfer was stopped, because another part of it failed or the gang ended: "
                "send the matrix again",
                cause=NODE_FAILED,
            )
        self._note(self._ready_now(list(self._computing), 0.0))
        self._start()
        if self._local:
            self._send_local()
            timeout_s = 0.0
        done = self._ready_now([*self._jobs, *self._computing], timeout_s)
        if not done:
            if timeout_s:
                self.connection.ping()  # raises if the gang is lost
            return
        self._collect([ref for ref in done if ref in self._jobs])

    @staticmethod
    def _ready_now(refs: list[Any], timeout_s: float) -> list[Any]:
        """The refs that are ready; waits for the first one."""
        if not refs:
            return []
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return list(ready)

    def _note(self, refs: list[Any]) -> None:
        m, n = self.target.distribution.shape
        nbytes = m * n * self.target.dtype.itemsize
        for ref, location in zip(refs, locate_objects(refs) if refs else [], strict=True):
            near = location.here and nbytes <= OWN_BYTES
            waiting = self._local if near else self._ready.setdefault(location.node, deque())
            waiting.extend(self._computing.pop(ref))

    def _start(self) -> None:
        for node, waiting in self._ready.items():
            while waiting and self._running[node] < JOBS_PER_NODE:
                blocks = self._taken(waiting, JOB_BYTES)
                job = SendJob(
                    self.connection.address.incarnation,
                    self.connection.endpoints,
                    self.target,
                    self.decoder,
                    tuple(block._replace(source=None) for block in blocks),
                )
                ref = agent_of(node).run.remote(job, [block.source for block in blocks])
                self._jobs[ref] = (node, blocks)
                self._running[node] += 1

    def _taken(self, waiting: deque[SourceBlock], most: int) -> list[SourceBlock]:
        """The blocks of one job."""
        blocks, nbytes = [], 0
        while waiting and nbytes < most:
            blocks.append(waiting.popleft())
            nbytes += self._nbytes(blocks[-1])
        return blocks

    def _send_local(self) -> None:
        blocks = self._taken(self._local, OWN_BYTES)
        nodes = self.connection.nodes
        add_times(self.times, write(nodes, self.target, self.decoder, blocks, self.progress))
        self.in_flight -= sum(map(self._nbytes, blocks))

    def _collect(self, jobs: list[Any]) -> None:
        for ref in jobs:
            node, blocks = self._jobs.pop(ref)
            self._running[node] -= 1
            add_times(self.times, answer_of(ref, node))
            nbytes = sum(map(self._nbytes, blocks))
            self.in_flight -= nbytes
            if self.progress is not None:
                self.progress(nbytes)

    def _nbytes(self, block: SourceBlock) -> int:
        return block.shape[0] * block.shape[1] * self.target.dtype.itemsize
