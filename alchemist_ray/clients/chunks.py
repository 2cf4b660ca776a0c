"""Pieces of a matrix that tasks of the cluster make: sent as they are ready, then let go.

Dask's chunks and Ray Data's blocks are objects in the store. Each goes to the agent of the
node that holds it, several in one job, and its reference is dropped when it has arrived. The
agent, not the task that made it, writes into the ranks' memory: Ray may run a task twice, and
a piece that is written twice would break the matrix.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from alchemist_ray.blocks import Origin, SendJob, together
from alchemist_ray.errors import AlchemistError, DtypeError, ShapeError, TransferError
from alchemist_ray.panels import panels
from alchemist_ray.transfer import NODE_FAILED, agent_of, answer_of, holders, looked
from mpi_workers.client import Progress, RankTimes, Target, Writer
from mpi_workers.layout import Shape

if TYPE_CHECKING:
    from alchemist_ray.gang import GangClient

JOB_BYTES = 64 << 20  # 64 MiB: what one job sends; the store gets it back when it is over
JOBS = 2  # of a node at a time: the next is there when one ends
END_S = 2.0  # for jobs under way, where a transfer has failed

Array = NDArray[Any]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of Ray's tracebacks


class Piece(NamedTuple):
    """A part of a matrix: an object in the store, or an array of this process."""

    source: Any
    origin: Origin
    shape: Shape
    label: str  # for messages


class Reader(Protocol):
    """Makes arrays of a system's objects, in the agents; must be picklable."""

    def look(self, value: Any) -> Any:
        """What is to be known of it. Raises the tree's errors where it is no part of a matrix."""

    def arrays(self, value: Any) -> list[Array]:
        """Its elements: 2-D arrays of as many rows each, to lie beside each other."""


class ArrayReader:
    """For objects that are arrays."""

    def look(self, value: Any) -> Shape:
        """Its shape."""
        (array,) = self.arrays(value)
        return array.shape[0], array.shape[1]

    def arrays(self, value: Any) -> list[Array]:
        if isinstance(value, np.ma.MaskedArray) and value.mask.any():
            raise DtypeError("it is masked, and has elements without a value: fill them first")
        if hasattr(value, "tocsr") or hasattr(value, "todense"):
            raise DtypeError("it is sparse: make it dense first")
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise DtypeError(f"its elements of dtype {array.dtype} are not numbers")
        if array.ndim not in (1, 2):
            raise ShapeError(f"it has shape {array.shape}, and a matrix has two dimensions")
        return [array[:, np.newaxis] if array.ndim == 1 else array]


def _opened(refs: Sequence[ray.ObjectRef], labels: Sequence[str]) -> list[Any]:
    """Objects' values. Raises `TransferError` with what a task has raised."""
    try:
        return list(ray.get(list(refs)))
    except RayError:
        return [_value(ref, label) for ref, label in zip(refs, labels, strict=True)]


def _value(ref: ray.ObjectRef, label: str) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause, told = error.cause, _COLOURS.sub("", str(error))
        if isinstance(cause, AlchemistError):  # one of our own functions in the graph
            raise _named(cause, label) from None
        raise TransferError(
            f"{label} could not be computed: {type(cause).__name__}: {cause}\n\n"
            f"--- where it was raised ---\n{told}",
            cause=NODE_FAILED,
            traceback=told,
        ) from None
    except RayError as error:  # its worker was killed too often, its node is gone, ...
        raise TransferError(
            f"{label} could not be computed: {type(error).__name__}: {error}", cause=NODE_FAILED
        ) from None


def _named(error: AlchemistError, label: str) -> AlchemistError:
    return type(error)(f"{label}: {error.args[0]}", **error.facts)


@dataclass(frozen=True, slots=True)
class LookChunks:
    """Tells what is to be known of each piece; runs in the agent of the node that holds them."""

    reader: Reader
    labels: tuple[str, ...]
    sizes: tuple[int, ...]  # in the store

    def run(self, refs: Sequence[ray.ObjectRef]) -> list[Any]:
        found = []
        for some in together(self.sizes):
            labels = self.labels[some]
            for value, label in zip(_opened(refs[some], labels), labels, strict=True):
                try:
                    found.append(self.reader.look(value))
                except AlchemistError as error:
                    raise _named(error, label) from None
        return found


@dataclass(frozen=True, slots=True)
class SendChunks(SendJob):
    """Sends pieces to the ranks; runs in the agent of the node that holds them."""

    reader: Reader
    labels: tuple[str, ...]
    shapes: tuple[Shape, ...]

    def opened(self, blocks: Sequence[ray.ObjectRef]) -> tuple[list[Any], Sequence[Origin]]:
        values = _opened(blocks, self.labels)
        pieces = map(Piece, values, self.origins, self.shapes, self.labels)
        return cut(pieces, self.reader, self.target.dtype)


def cut(
    pieces: Iterable[Piece], reader: Reader, dtype: np.dtype[Any]
) -> tuple[list[Array], list[Origin]]:
    """The arrays of pieces that are here, and where each belongs.

    Raises
    ------
    ShapeError, DtypeError
        If one is not what its collection has promised.
    """
    found, origins = [], []
    for value, (row, col), shape, label in pieces:
        try:
            arrays = reader.arrays(value)
        except AlchemistError as error:
            raise _named(error, label) from None
        actual = (arrays[0].shape[0], sum(array.shape[1] for array in arrays))
        if actual != shape:
            raise ShapeError(
                f"{label} has shape {actual}, and {shape} was promised: does a function that was "
                "mapped over it return what it says?"
            )
        for array in arrays:
            if not np.can_cast(array.dtype, dtype, "same_kind"):
                raise DtypeError(
                    f"{label} has elements of dtype {array.dtype}, which cannot be sent as "
                    f"{dtype} without loss: does a function that was mapped over it return what "
                    "it says?"
                )
            found.append(array)
            origins.append((row, col))
            col += array.shape[1]
    return found, origins


def look(refs: Sequence[ray.ObjectRef], labels: Sequence[str], reader: Reader) -> list[Any]:
    """What a reader tells of every object, found out where it lies."""
    held = holders(refs)

    def job_for(members: list[int]) -> LookChunks:
        named = tuple(labels[i] for i in members)
        return LookChunks(reader, named, tuple(held[i].nbytes for i in members))

    return looked(refs, held, job_for)


class Sender:
    """Sends pieces that are there, or will be.

    Parameters
    ----------
    client : GangClient
        The gang; it is watched whenever nothing moves.
    target : Target
        The matrix.
    reader : Reader
        What the pieces' objects are.
    progress : callable(nbytes), optional

    Notes
    -----
    Not thread-safe, but its calls may come from different threads, one after the other.
    """

    def __init__(
        self, client: GangClient, target: Target, reader: Reader, progress: Progress | None
    ) -> None:
        self._client = client
        self._target = target
        self._reader = reader
        self._progress = progress
        self._making: defaultdict[Any, list[Piece]] = defaultdict(list)  # by object
        self._ready: defaultdict[str, deque[Piece]] = defaultdict(deque)  # by node
        self._own: list[Piece] = []  # arrays of this process
        self._own_bytes = 0
        self._jobs: dict[Any, tuple[str, list[Piece]]] = {}
        self._running: defaultdict[str, int] = defaultdict(int)
        self._over = False
        self.in_flight = 0  # bytes of objects that were added and have not yet arrived
        self.times: dict[int, RankTimes] = {}

    def add(self, piece: Piece) -> None:
        """Take a piece; it is sent by later calls."""
        if isinstance(piece.source, ray.ObjectRef):
            self.in_flight += self._nbytes(piece)
            self._making[piece.source].append(piece)
            return
        self._own.append(piece)
        self._own_bytes += self._nbytes(piece)
        if self._own_bytes >= JOB_BYTES:
            self._send_own()

    def down_to(self, nbytes: int) -> None:
        """Send until no more than `nbytes` are in flight. Raises what went wrong."""
        while self.in_flight > nbytes:
            self.step(1.0)

    def finish(self) -> None:
        """Send all."""
        self._send_own()
        while self._making or self._jobs or any(self._ready.values()):
            self.step(1.0)

    def stop(self) -> None:
        """Nothing more is wanted: wait for what is being sent.

        Tasks that were submitted run to their end, and what they make is let go. To cancel them
        may cost this process: Ray 2.60 aborts on one that ends at that moment ("Tried to
        complete task that was not pending").
        """
        self._over = True
        making, jobs = list(self._making), list(self._jobs)
        deadline = time.monotonic() + END_S
        for ref in jobs:  # they write into memory that is about to be freed
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        for ref in self._ready_now(making, 0.0):  # an error that is seen is not printed
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=0)

    def step(self, timeout_s: float) -> None:
        """Note what is ready, and start the jobs that are possible; wait for something to do."""
        if self._over:
            raise TransferError("the transfer was given up", cause=NODE_FAILED)
        self._note(self._ready_now(list(self._making), 0.0))
        self._start()
        done = self._ready_now([*self._jobs, *self._making], timeout_s)
        if not done:
            if timeout_s:
                self._client.request({"op": "list_workers"})  # raises if the gang is lost
            return
        self._collect([ref for ref in done if ref in self._jobs])

    @staticmethod
    def _ready_now(refs: list[Any], timeout_s: float) -> list[Any]:
        """Those that are there; waits for the first of them."""
        if not refs:
            return []
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return list(ready)

    def _note(self, refs: list[Any]) -> None:
        for ref, (node, _) in zip(refs, holders(refs) if refs else [], strict=True):
            self._ready[node].extend(self._making.pop(ref))

    def _start(self) -> None:
        for node, waiting in self._ready.items():
            while waiting and self._running[node] < JOBS:
                pieces, nbytes = [], 0
                while waiting and nbytes < JOB_BYTES:
                    pieces.append(waiting.popleft())
                    nbytes += self._nbytes(pieces[-1])
                job = SendChunks(
                    self._client.run_name,
                    self._client.doors,
                    self._target,
                    tuple(piece.origin for piece in pieces),
                    self._reader,
                    tuple(piece.label for piece in pieces),
                    tuple(piece.shape for piece in pieces),
                )
                ref = agent_of(node).run.remote(job, [piece.source for piece in pieces])
                self._jobs[ref] = (node, pieces)
                self._running[node] += 1

    def _collect(self, jobs: list[Any]) -> None:
        for ref in jobs:
            node, pieces = self._jobs.pop(ref)
            self._running[node] -= 1
            self._add_times(answer_of(ref))
            nbytes = sum(map(self._nbytes, pieces))
            self.in_flight -= nbytes
            if self._progress is not None:
                self._progress(nbytes)

    def _send_own(self) -> None:
        if not self._own:
            return
        dtype = self._target.dtype
        arrays, origins = cut(self._own, self._reader, dtype)
        with Writer(self._client.ranks, self._target, self._progress) as writer:
            for panel, origin in panels(arrays, origins, dtype):
                writer.write_block(panel, origin)
        self._own, self._own_bytes = [], 0
        self._add_times(writer.times)

    def _add_times(self, times: dict[int, RankTimes]) -> None:
        for rank, part in times.items():
            self.times.setdefault(rank, RankTimes(rank, part.route)).add(part)

    def _nbytes(self, piece: Piece) -> int:
        return piece.shape[0] * piece.shape[1] * self._target.dtype.itemsize
