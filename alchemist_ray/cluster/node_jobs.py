"""Jobs on a node: inspect and send blocks of its object store; move matrices to other ranks.

By the node's agent; and by the user's process, if they lie on its node. A job opens several
objects at once, without a copy, checks each of them, and writes into the ranks' memory. Cutting a
block by layout has a cost per block and rank, and one per column: small or low blocks that are
adjacent are copied into a panel first, others are written from where they are.

Every node of the new incarnation moves a part of each matrix: it reads panels from the old ranks,
wherever they are, and writes them to the new ones. No data pass through the GroupManager.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from alchemist_ray.attached.connection import NODE_FAILED
from alchemist_ray.dtypes import as_array, as_numbers, check_range
from alchemist_ray.errors import AlchemistError, DtypeError, ShapeError, TransferError, from_failure
from mpi_workers.columns.missing import ERROR, Missing
from mpi_workers.data.description import DataEndpoints, NodeTimes, TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter, Progress
from mpi_workers.failures import Failure
from mpi_workers.matrix.copy_kernels import ArrayBlock
from mpi_workers.matrix.dtypes import castable
from mpi_workers.matrix.layout import ArrayShape, Shape, stored_shape
from mpi_workers.matrix.neighbours import joined
from mpi_workers.matrix.node_shares import Region
from mpi_workers.node.cleanup import runs_here
from mpi_workers.wire.frames import WireError

Array = NDArray[Any]
Origin = tuple[int, int]

_FRAME = re.compile(r' *File "(.+)", line .*\n(?:    .*\n)*')
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of Ray's tracebacks


class OpenBlock(NamedTuple):
    """The contents of an inspected object, which stays open until it is sent."""

    arrays: list[Array]


class SourceBlock(NamedTuple):
    """A part of a matrix: an object in the store, what was kept of one, or an array."""

    source: Any
    origin: Origin
    shape: Shape
    label: str  # for messages


class BlockDecoder(Protocol):
    """Makes arrays of a system's objects, in the agents; must be picklable."""

    def arrays(self, value: Any) -> list[Array]:
        """Its elements: arrays whose stored matrices have the same number of rows, side by side.

        Raises `AlchemistError` if it is not part of a matrix.
        """

    def about(self, value: Any, arrays: list[Array]) -> Any:
        """Facts about it and its arrays that are needed before it is sent."""


@dataclass(frozen=True, slots=True)
class ArrayDecoder:
    """For objects that are arrays, of at most so many axes."""

    max_axes: int = 2
    missing: Missing = ERROR

    def arrays(self, value: Any) -> list[Array]:
        if hasattr(value, "tocsr") or hasattr(value, "todense"):
            raise DtypeError("it is sparse: make it dense first")
        array = as_numbers(as_array(value, "it", self.missing)[0])
        if not 1 <= array.ndim <= self.max_axes:
            most = "two" if self.max_axes == 2 else f"one to {self.max_axes}"
            raise ShapeError(f"it has shape {array.shape}, and must have {most} dimensions")
        return [array]

    def about(self, value: Any, arrays: list[Array]) -> tuple[ArrayShape, str]:
        """Its shape and its dtype."""
        (array,) = arrays
        return array.shape, array.dtype.str


def _opened(refs: Sequence[ray.ObjectRef], labels: Sequence[str]) -> list[Any]:
    """Objects' values. Raises `TransferError` with what a task has raised."""
    if not refs:
        return []  # without Ray, which `ray.get` would start
    try:
        return list(ray.get(list(refs)))
    except RayError:
        return [_value(ref, label) for ref, label in zip(refs, labels, strict=True)]


def task_failure(words: str, error: RayTaskError, **facts: Any) -> TransferError:
    """The error about a user's task that has raised, with the frames that are not of packages."""
    told = _COLOURS.sub("", str(error))
    shown = _FRAME.sub(lambda frame: "" if "/site-packages/" in frame[1] else frame[0], told)
    return TransferError(
        f"{words}: {type(error.cause).__name__}: {error.cause}\n\n"
        f"--- where it was raised ---\n{shown if _FRAME.search(shown) else told}",
        traceback=told,
        **facts,
    )


def _value(ref: ray.ObjectRef, label: str) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, AlchemistError):  # of a function of this package in the graph
            raise _named(error.cause, label) from None
        raise task_failure(f"{label} could not be computed", error, cause=NODE_FAILED) from None
    except RayError as error:  # its worker was killed too often, its node is gone, ...
        raise TransferError(
            f"{label} could not be computed: {type(error).__name__}: {error}", cause=NODE_FAILED
        ) from None


def _arrays(reader: BlockDecoder, value: Any, label: str) -> list[Array]:
    try:
        return reader.arrays(value)
    except AlchemistError as error:
        raise _named(error, label) from None


def _named(error: AlchemistError, label: str) -> AlchemistError:
    return type(error)(f"{label}: {error.args[0]}", **error.facts)


OPENED_NBYTES = 64 << 20  # 64 MiB: objects opened at once
PANEL_NBYTES = 16 << 20  # 16 MiB: the largest panel of small blocks that are written as one


def together(sizes: Sequence[int]) -> Iterator[slice]:
    """Groups of objects to open at once: one by one costs three times as much.

    Sizes are those in the store, and 0 where Ray does not know them.
    """
    start = nbytes = 0
    for i, size in enumerate(sizes):
        nbytes += size or OPENED_NBYTES
        if nbytes >= OPENED_NBYTES or i + 1 == len(sizes):
            yield slice(start, i + 1)
            start, nbytes = i + 1, 0


@dataclass(frozen=True, slots=True)
class InspectJob:
    """Describes each piece; runs in the agent of the node that holds them."""

    reader: BlockDecoder
    labels: tuple[str, ...]
    sizes: tuple[int, ...]  # in the store

    def run(self, refs: Sequence[ray.ObjectRef]) -> list[Any]:
        return [about for about, _ in self.opened(refs)]

    def opened(self, refs: Sequence[ray.ObjectRef]) -> Iterator[tuple[Any, OpenBlock]]:
        """The same, with the objects' arrays."""
        for some in together(self.sizes):
            labels = self.labels[some]
            for value, label in zip(_opened(refs[some], labels), labels, strict=True):
                kept = OpenBlock(_arrays(self.reader, value, label))
                yield self.reader.about(value, kept.arrays), kept


@dataclass(frozen=True, slots=True)
class SendJob:
    """Sends pieces to the ranks; runs in the agent of the node that holds them."""

    gang: str
    endpoints: DataEndpoints
    target: TransferTarget
    reader: BlockDecoder
    pieces: tuple[SourceBlock, ...]  # without their sources

    def run(self, refs: Sequence[ray.ObjectRef]) -> dict[int, NodeTimes]:
        """Send the objects, one for each piece."""
        filled = zip(self.pieces, refs, strict=True)
        pieces = [piece._replace(source=ref) for piece, ref in filled]
        return write(_nodes_of(self.gang, self.endpoints), self.target, self.reader, pieces)


def write(
    nodes: NodeConnections,
    target: TransferTarget,
    reader: BlockDecoder,
    pieces: Sequence[SourceBlock],
    progress: Progress | None = None,
) -> dict[int, NodeTimes]:
    """Write pieces that are arrays, or objects on this node, into the ranks' memory.

    While a group of them is written, a thread opens the next one.
    """
    groups = list(_groups(pieces, target.dtype.itemsize))
    opened = nodes.run_ahead(partial(_opened_blocks, reader=reader, dtype=target.dtype), groups)
    with MatrixWriter(nodes, target, progress) as writer:
        for blocks in opened:
            if isinstance(blocks, AlchemistError):
                break  # raised below: the writer's connections are in order
            for panel in panels(blocks, target.dtype, writer.is_small, nodes.run_parallel):
                writer.write_blocks(panel)
        else:
            return writer.times
    raise blocks


def _groups(pieces: Sequence[SourceBlock], itemsize: int) -> Iterator[Sequence[SourceBlock]]:
    """Pieces to open at once; those that are open already make one group."""
    if not any(isinstance(piece.source, ray.ObjectRef) for piece in pieces):
        yield pieces
        return
    for some in together([math.prod(piece.shape) * itemsize for piece in pieces]):
        yield pieces[some]


def _opened_blocks(
    pieces: Sequence[SourceBlock], reader: BlockDecoder, dtype: np.dtype[Any]
) -> list[ArrayBlock] | AlchemistError:
    far = [i for i, piece in enumerate(pieces) if isinstance(piece.source, ray.ObjectRef)]
    here = list(pieces)
    try:
        values = _opened([pieces[i].source for i in far], [pieces[i].label for i in far])
        for i, value in zip(far, values, strict=True):
            here[i] = here[i]._replace(source=value)
        return cut(here, reader, dtype)
    except AlchemistError as error:
        return error


def cut(
    pieces: Iterable[SourceBlock], reader: BlockDecoder, dtype: np.dtype[Any]
) -> list[ArrayBlock]:
    """The arrays of local blocks, and the origin of each.

    Raises
    ------
    ShapeError, DtypeError
        If one is not what its collection declares.
    """
    found = []
    for value, (row, col), shape, label in pieces:
        given = value.arrays if isinstance(value, OpenBlock) else _arrays(reader, value, label)
        arrays = [array.reshape(stored_shape(array.shape)) for array in given]
        actual = (arrays[0].shape[0], sum(array.shape[1] for array in arrays))
        if actual != shape:
            raise ShapeError(
                f"{label} has shape {actual}, and {shape} was declared: check that a function that "
                "was mapped over it returns the declared shape"
            )
        for array in arrays:
            if not castable(array.dtype, dtype):
                raise DtypeError(
                    f"{label} has elements of dtype {array.dtype}, which cannot be sent as "
                    f"{dtype} without loss: check that a function that was mapped over it returns "
                    "the declared dtype"
                )
            check_range(array, dtype, label)
            found.append(ArrayBlock(array, (row, col)))
            col += array.shape[1]
    return found


def panels(
    blocks: Sequence[ArrayBlock],
    dtype: np.dtype[Any],
    is_small: Callable[[NDArray[Any]], bool],
    share_out: Callable[[Callable[[int], object], Sequence[int]], None],
) -> Iterator[Sequence[ArrayBlock]]:
    """The same elements in larger blocks, where blocks are adjacent.

    Blocks that are not small come as they are, all at once. Use each yielded block before
    asking for the next one. `share_out` runs a function for each of some numbers, in this thread
    or in several.
    """
    most = PANEL_NBYTES // dtype.itemsize
    small, whole = [], []
    for i, block in enumerate(blocks):
        if is_small(block.array):
            small.append((block.bounds, [i]))
        else:
            whole.append(block)
    boxes = joined(joined(small, 1, most), 0, most)
    whole += [blocks[members[0]] for _, members in boxes if len(members) == 1]
    if whole:
        yield whole
    for (row0, row1, col0, col1), members in boxes:
        if len(members) == 1:
            continue
        size = (row1 - row0) * (col1 - col0)
        panel = _scratch()[: size * dtype.itemsize].view(dtype).reshape(row1 - row0, col1 - col0)
        box = ArrayBlock(panel, (row0, col0))
        share_out(partial(_place, blocks, box), members)
        yield [box]


def _place(blocks: Sequence[ArrayBlock], box: ArrayBlock, i: int) -> None:
    """Copy a block to where it belongs in the panel of a box."""
    row0, row1, col0, col1 = blocks[i].bounds
    row, col = box.origin
    here = box.array[row0 - row : row1 - row, col0 - col : col1 - col]
    np.copyto(here, blocks[i].array, casting="unsafe")  # checked


_own = threading.local()


def _scratch() -> NDArray[np.uint8]:
    """This thread's memory for a panel: warm after the first."""
    if not hasattr(_own, "scratch"):
        _own.scratch = np.empty(PANEL_NBYTES, np.uint8)
    scratch: NDArray[np.uint8] = _own.scratch
    return scratch


# The agent's open connections and mappings, by gang.
_warm: dict[str, NodeConnections] = {}
_warming = threading.RLock()


def _nodes_of(gang: str, endpoints: DataEndpoints) -> NodeConnections:
    with _warming:
        found = _warm.get(gang)
        if found is None or found.endpoints != endpoints:
            forget(gang)
            found = _warm[gang] = NodeConnections(endpoints)
        return found


def forget(ended: str = "") -> None:
    """Close connections and mappings of gangs that have ended: they keep memory mapped.

    Parameters
    ----------
    ended : str
        A gang that is known to have ended here; the others are looked for.
    """
    with _warming:
        for gang in list(_warm):
            if gang == ended or (_warm[gang].resting and not runs_here(gang)):
                _warm.pop(gang).close()


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copies a region of a matrix into one of another gang; runs where ranks of either are.

    Attributes
    ----------
    gangs : (str, str)
        The incarnations of both.
    endpoints : (DataEndpoints, DataEndpoints)
    source, target : TransferTarget
    region : Region
    name : str
        Of the matrix that is read, for messages.
    """

    gangs: tuple[str, str]
    endpoints: tuple[DataEndpoints, DataEndpoints]
    source: TransferTarget
    target: TransferTarget
    region: Region
    name: str

    def run(self, refs: Sequence[Any]) -> dict[int, NodeTimes]:
        """Raises `Failure` and `AlchemistError`."""
        theirs, ours = map(_nodes_of, self.gangs, self.endpoints)
        reader = MatrixReader(theirs, self.source, region=self.region)
        writer = MatrixWriter(ours, self.target, region=self.region)
        both = (reader, writer) if self.gangs[0] < self.gangs[1] else (writer, reader)
        with both[0], both[1]:  # always in this order, so that two jobs cannot deadlock
            check = partial(check_range, dtype=self.target.dtype, what=self.name)
            writer.copy_from(reader, self.region, check)
        return writer.times


MOVED_BYTES = 8 << 20  # 8 MiB of a matrix: the parts that jobs share out


@dataclass(frozen=True, slots=True)
class MoveJob:
    """Moves a part of each matrix.

    Attributes
    ----------
    source, target : DataEndpoints
        Of the two incarnations.
    matrices : tuple of (TransferTarget, TransferTarget)
        Each matrix on the old ranks and on the new ones.
    number, count : int
        This job moves every `count`-th panel, from panel `number` on.
    """

    source: DataEndpoints
    target: DataEndpoints
    matrices: tuple[tuple[TransferTarget, TransferTarget], ...]
    number: int
    count: int

    def run(self, refs: Sequence[Any]) -> None:
        """Raises `AlchemistError`."""
        old, new = NodeConnections(self.source), NodeConnections(self.target)
        turn = self.number
        try:
            for before, after in self.matrices:
                m, n = before.distribution.shape
                panels = list(Region(0, m, 0, n).parts(MOVED_BYTES // before.dtype.itemsize))
                mine = panels[turn :: self.count]
                turn = (turn - len(panels)) % self.count  # small matrices are shared out, too
                if mine:
                    with MatrixReader(old, before) as reader, MatrixWriter(new, after) as writer:
                        for panel in mine:
                            writer.copy_from(reader, panel)
        except Failure as failure:
            raise from_failure(failure) from None
        except (WireError, OSError) as error:
            raise TransferError(
                f"node {os.uname().nodename} could not move its part: {error}. The gang is "
                "unchanged: call als.resize again"
            ) from error
        finally:
            old.close()
            new.close()
