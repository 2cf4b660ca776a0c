"""The output of a session with ``verbose=True``: workers, libraries, matrices, and calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from alchemist_ray.gang.matrix_ref import MatrixRef
from alchemist_ray.plural import counted
from mpi_workers.matrix.sizes import readable

if TYPE_CHECKING:
    from alchemist_ray.gang.connection import GangConnection
    from alchemist_ray.gang.info import WorkerInfo

VALUE_LENGTH = 40


@contextmanager
def narrated(connection: GangConnection, what: str) -> Iterator[None]:
    """Print that something begins, and that it has ended and how long it took."""
    if not connection.options.verbose:
        yield
        return
    say(f"{what} ...")
    begun = time.perf_counter()
    try:
        yield
    except BaseException as error:
        say(f"{what}: {type(error).__name__} after {time.perf_counter() - begun:.3f} s")
        raise
    say(f"{what}: done in {time.perf_counter() - begun:.3f} s")


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def workers_table(workers: Sequence[WorkerInfo]) -> str:
    """The ranks of a gang, a line for each."""
    lines = [f"Allocated {counted(len(workers), 'worker')}:"]
    lines += [
        f"  rank {worker.rank} on {worker.hostname} at {worker.address} (pid {worker.pid})"
        for worker in workers
    ]
    return "\n".join(lines)


def call_text(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call as a user would write it, with the facts of its matrices."""
    given = [_value(value) for value in args]
    given += [f"{key}={_value(value)}" for key, value in kwargs.items()]
    return f"Task {name}({', '.join(given)})"


def matrix_text(ref: MatrixRef) -> str:
    """A matrix: name, shape, dtype, layout, size."""
    shape = " x ".join(map(str, ref.shape)) or "number"
    return f"{ref.name} ({shape}, {ref.dtype}, {ref.layout}, {readable(ref.nbytes)})"


def _value(value: Any) -> str:
    if isinstance(value, MatrixRef):
        return matrix_text(value)
    if isinstance(value, bytes):
        return f"<{readable(len(value))}>"
    text = repr(value)
    return text if len(text) <= VALUE_LENGTH else f"{text[: VALUE_LENGTH - 3]}..."
