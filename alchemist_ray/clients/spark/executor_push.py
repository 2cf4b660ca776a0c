"""Counts partitions, and sends them to the ranks. Runs in Spark's Python workers (see `arrow.py`).

A task sends all partitions of one core over one connection per rank, which it closes at its end. It
returns its result, or its failure, as a row: if it raised, Spark would repeat the task and write
twice.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from alchemist_ray.clients.spark.arrow import blocks_of, fitting, rows_of
from mpi_workers.data.description import DataEndpoints, TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import RowWriter
from mpi_workers.failures import Failure

MIN_RUN = 16  # rows: if consecutive runs are longer on average, they are sent as blocks
REPORT_SCHEMA = "report string, places binary"  # of a task that sends: JSON, `packed`

COUNT_SCHEMA = "part int, rows long"  # of a task that counts

Batches = Iterator[Any]
Push = Callable[[RowWriter, Batches], tuple[dict[str, Any], Any]]


def count(batches: Batches) -> Batches:
    """Count rows by partition. Each row of a batch is the number of its partition."""
    rows = np.zeros(0, np.int64)
    for batch in batches:
        more = np.bincount(batch.column(0).to_numpy(zero_copy_only=False))
        rows, more = (rows, more) if len(rows) >= len(more) else (more, rows)
        rows[: len(more)] += more
    parts = np.flatnonzero(rows)
    yield pa.RecordBatch.from_pydict(
        {"part": pa.array(parts.astype(np.int32)), "rows": pa.array(rows[parts])}
    )


def task(
    endpoints: DataEndpoints, target: TransferTarget, push: Push
) -> Callable[[Batches], Batches]:
    """The function for `mapInArrow` that sends with `push`."""

    def run(batches: Batches) -> Batches:
        from pyspark import TaskContext  # noqa: PLC0415

        report: dict[str, Any]
        places = np.empty(0, np.int64)
        context = TaskContext.get()
        assert context is not None
        attempt = context.attemptNumber()
        if attempt:
            for _ in batches:  # if the source raises again, its error says more
                pass
            report = {"again": attempt}
        else:
            nodes = NodeConnections(endpoints, threads=1)  # other cores have tasks of their own
            try:
                with RowWriter(nodes, target) as writer:
                    report, places = push(writer, batches)
                report["times"] = [asdict(times) for times in writer.times.values()]
            except Failure as failure:
                report = {"failure": failure.to_map()}
            finally:
                nodes.close()
        report["stage"] = context.stageId()
        yield pa.RecordBatch.from_pydict(
            {"report": [json.dumps(report)], "places": [packed(places)]}
        )

    return run


def packed(numbers: Any) -> bytes:
    """Numbers in a few bits each if sorted: Spark limits the size of a job's results to 1 GB."""
    steps = np.diff(np.ravel(numbers), prepend=0)
    longest = int(np.abs(steps).max(initial=0))
    kind = next(kind for kind in "bhiq" if longest <= np.iinfo(kind).max)
    return kind.encode() + zlib.compress(steps.astype(kind).tobytes(), 1)


def unpacked(data: bytes) -> Any:
    """The numbers that `packed` was given."""
    steps = np.frombuffer(zlib.decompress(data[1:]), data[:1].decode())
    return np.cumsum(steps, dtype=np.int64)


def ordered_rows(
    names: list[str],
    kinds: list[str],
    widths: list[int],
    dtype: Any,
    starts: list[int],
) -> Push:
    """Send rows without numbers, ordered by partition and then within each.

    The last column of a batch is the number of the partition; partition p begins at row
    ``starts[p]`` and ends at row ``starts[p + 1]``.
    """

    def push(writer: RowWriter, batches: Batches) -> tuple[dict[str, Any], Any]:
        seen: dict[int, int] = {}
        for batch in batches:
            if not batch.num_rows:
                continue
            columns = batch.columns
            block = rows_of(columns[:-1], names, kinds, widths, dtype)
            parts = columns[-1].to_numpy(zero_copy_only=False)
            cuts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
            rows = np.empty(len(parts), np.int64)
            for first, last in pairwise(cuts):
                part = int(parts[first])
                start = starts[part] + seen.get(part, 0) if part + 1 < len(starts) else 0
                seen[part] = seen.get(part, 0) + last - first
                if part + 1 >= len(starts) or start + last - first > starts[part + 1]:
                    raise Failure(
                        "TransferError",
                        f"partition {part} has more rows than when it was counted, so its rows "
                        "change between jobs: df.cache() or df.checkpoint() it first",
                    )
                rows[first:last] = np.arange(start, start + last - first)
            _write(writer, block, rows)
        return {"seen": seen}, np.empty(0, np.int64)

    return push


def _write(writer: RowWriter, block: Any, rows: Any) -> None:
    """Write runs of consecutive rows as blocks."""
    cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    for first, last in pairwise(cuts):
        writer.write_block(block[first:last], (int(rows[first]), 0))


def numbered_rows(name: str, width: int, height: int, dtype: Any) -> Push:
    """Send rows with numbers; the columns are the number and a vector."""

    def push(writer: RowWriter, batches: Batches) -> tuple[dict[str, Any], Any]:
        places = [np.empty(0, np.int64)]
        for batch in batches:
            if not batch.num_rows:
                continue
            rows = batch.column(0).to_numpy(zero_copy_only=False)
            block = rows_of([batch.column(1)], [name], ["vector"], [width], dtype)
            if rows.min() < 0 or rows.max() >= height:
                raise Failure(
                    "ShapeError",
                    f"rows {rows.min()} to {rows.max()} are outside of a {height} x {width} matrix",
                )
            breaks = np.count_nonzero(np.diff(rows) != 1)
            if breaks * MIN_RUN < len(rows):
                _write(writer, block, rows)
            else:
                order = np.argsort(rows, kind="stable")
                rows = rows[order]
                same = np.flatnonzero(np.diff(rows) == 0)
                if len(same):
                    raise _duplicate(f"row {rows[same[0]]}")
                writer.write_rows(block[order], rows)
            places.append(rows)
        return {}, np.sort(np.concatenate(places))

    return push


def _duplicate(what: str) -> Failure:
    return Failure(
        "IncompleteMatrixError",
        f"{what} appears twice: drop duplicates, or add them up",
    )


def numbered_blocks(rows_per_block: int, cols_per_block: int, dtype: Any) -> Push:
    """Send blocks with numbers; the columns are a pair of numbers and a matrix."""

    def push(writer: RowWriter, batches: Batches) -> tuple[dict[str, Any], Any]:
        places: dict[tuple[int, int], None] = {}
        for batch in batches:
            down, across = (k.to_numpy(zero_copy_only=False) for k in batch.column(0).flatten())
            for i, j, block in zip(down, across, blocks_of(batch.column(1)), strict=True):
                where = int(i), int(j)
                if where in places:
                    raise _duplicate(f"block {where}")
                _check_block(writer, where, block, rows_per_block, cols_per_block)
                origin = where[0] * rows_per_block, where[1] * cols_per_block
                writer.write_block(fitting(block, dtype, f"block {where}"), origin)
                places[where] = None
        return {}, np.array(list(places), np.int64)

    return push


def _check_block(
    writer: RowWriter, where: tuple[int, int], block: Any, down: int, across: int
) -> None:
    m, n = writer.shape
    due = min(down, m - where[0] * down), min(across, n - where[1] * across)
    if block.shape != due:
        raise Failure(
            "ShapeError",
            f"block {where} has shape {block.shape}; in a {m} x {n} matrix with blocks of "
            f"{down} x {across} it must have {due}",
        )
