"""Elements sent to ranks and fetched from them equal the array, over every route."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpi_workers.data import streams, transfers
from mpi_workers.data.description import TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.copy_kernels import ArrayBlock
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.node_shares import Region, row_groups
from mpi_workers.wire.frames import Kind
from tests.mpi_workers.transfers import (
    COPIED,
    RANKS,
    SINGLE,
    Array,
    distribution_of,
    fetch,
    new,
    numbers,
    sealed,
    send,
)
from tests.support import ranks as support
from tests.support.layouts import owned_indices

# --- sent and fetched ---


SHAPES = [(37, 23), (1, 1), (2, 3), (1, 40), (0, 5), (5, 0)]  # some ranks hold nothing


@pytest.mark.parametrize(
    ("shape", "size"), [(SHAPES[0], 1), (SHAPES[0], 4), *((shape, RANKS) for shape in SHAPES)]
)
@pytest.mark.parametrize("name", [*SINGLE, *COPIED])
def test_every_layout_stores_elements_at_their_place_and_returns_them(
    host: support.Host, gangs: dict[str, NodeConnections], name: str, shape: tuple[int, int],
    size: int, route: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    array = numbers(shape)
    with sealed(host, gangs[route], array, name, size) as target:
        for rank in range(size):
            rows, cols = owned_indices(name, array.shape, target.distribution.grid, rank)
            assert np.array_equal(host.local(target.matrix, rank), array[np.ix_(rows, cols)])
        for back in gangs.values():
            assert np.array_equal(fetch(back, target), array)
        monkeypatch.setattr(transfers, "UNMAPPED_BYTES", 0)
        assert np.array_equal(fetch(gangs["near"], target), array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_every_bit(
    host: support.Host, gangs: dict[str, NodeConnections], dtype: str, route: str
) -> None:
    array = numbers((33, 18), dtype)
    if array.dtype.kind in "fc":
        array[:3, 0] = np.nan, np.inf, -0.0
    with sealed(host, gangs[route], array, "MC_MR") as target:
        back = fetch(gangs[route], target)
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


def read_only(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


# Memory layouts of 60 x 50 elements.
STRIDES: dict[str, Callable[[Array], Array]] = {
    "C": lambda a: np.ascontiguousarray(a),
    "Fortran": lambda a: np.asfortranarray(a),
    "every second row and third column": lambda a: np.repeat(np.repeat(a, 2, 0), 3, 1)[::2, ::3],
    "rows backwards": lambda a: a[::-1].copy()[::-1],
    "columns backwards": lambda a: a[:, ::-1].copy()[:, ::-1],
    "Fortran, both backwards": lambda a: np.asfortranarray(a[::-1, ::-1])[::-1, ::-1],
    "a corner of a larger one": lambda a: np.pad(a, 7)[7:-7, 7:-7],
    "read-only": read_only,
    "not aligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "of a smaller dtype": lambda a: a.astype("int16"),
}


@pytest.mark.parametrize("name", ["VC_STAR", "STAR_VC", "MC_MR", "CIRC_CIRC"])
@pytest.mark.parametrize("way", STRIDES)
def test_a_source_may_have_any_strides(
    host: support.Host, gangs: dict[str, NodeConnections], way: str, name: str, route: str
) -> None:
    array = numbers((60, 50))
    source = STRIDES[way](array)
    assert np.array_equal(source, array)
    with sealed(host, gangs[route], array, name, blocks=[(source, (0, 0))]) as target:
        assert np.array_equal(fetch(gangs[route], target), array)


@pytest.mark.parametrize("name", ["VC_STAR", "STAR_VC", "MC_MR", "CIRC_CIRC"])
def test_a_destination_may_have_any_strides(
    host: support.Host, gangs: dict[str, NodeConnections], name: str, route: str
) -> None:
    array = numbers((60, 50))
    around = np.full((80, 120), 7.0)
    with sealed(host, gangs["near"], array, name) as target:
        for out in (
            np.empty((60, 50), order="F"),
            np.empty((60, 50))[::-1, ::-1],
            np.empty((120, 150))[::2, ::3],
            around[10:70, 5:105:2],
            np.empty((60, 50), "complex128"),
            np.empty((60, 50), ">f8"),
        ):
            assert np.array_equal(fetch(gangs[route], target, out), array)
    around[10:70, 5:105:2] = 7
    assert (around == 7).all()  # no other element was touched


@st.composite
def cut_matrices(draw: st.DrawFn) -> tuple[tuple[int, int], list[tuple[int, int, int, int]]]:
    """A shape, and half-open blocks that tile it."""
    m, n = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    rows = sorted({0, m, *draw(st.lists(st.integers(0, m), max_size=3))})
    blocks = []
    for r0, r1 in itertools.pairwise(rows):
        cols = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))})
        blocks += [(r0, r1, c0, c1) for c0, c1 in itertools.pairwise(cols)]
    return (m, n), draw(st.permutations(blocks))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=cut_matrices(),
    name=st.sampled_from(SINGLE),
    size=st.integers(1, RANKS),
    ways=st.tuples(st.sampled_from(["near", "far"]), st.sampled_from(["near", "far"])),
    order=st.sampled_from("CF"),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_matrix_made_of_any_blocks_can_be_read_in_any_region(
    host: support.Host, gangs: dict[str, NodeConnections], cut: Any, name: str, size: int,
    ways: tuple[str, str], order: Any, dtype: str, data: st.DataObject,
) -> None:  # fmt: skip
    shape, blocks = cut
    array = np.asarray(numbers(shape, dtype), order=order)
    target = new(host, distribution_of(name, shape, size), dtype)
    for some in (blocks[:1], blocks[1:]):  # blocks may come in several transfers
        parts = [(array[r0:r1, c0:c1], (r0, c0)) for r0, r1, c0, c1 in some]
        send(gangs[ways[0]], target, *parts)
    host.seal(target.matrix)
    with pytest.MonkeyPatch.context() as patch, MatrixReader(gangs[ways[1]], target) as reader:
        for _ in range(3):
            patch.setattr(transfers, "UNMAPPED_BYTES", data.draw(st.sampled_from([0, 1 << 20])))
            r0, r1 = sorted(data.draw(st.tuples(*2 * [st.integers(0, shape[0])])))
            c0, c1 = sorted(data.draw(st.tuples(*2 * [st.integers(0, shape[1])])))
            out = np.zeros((r1 - r0, c1 - c0), dtype, order=order)
            reader.read_block(out, (r0, c0))
            assert np.array_equal(out, array[r0:r1, c0:c1])
    out[...] = 0
    with MatrixReader(gangs[ways[1]], target, region=Region(r0, r1, c0, c1)) as reader:
        reader.read_block(out, (r0, c0))
    assert np.array_equal(out, array[r0:r1, c0:c1])
    host.free(target.matrix)


@pytest.mark.parametrize("name", [*SINGLE, *COPIED])
def test_a_matrix_can_be_sent_region_by_region(
    host: support.Host, gangs: dict[str, NodeConnections], name: str, route: str
) -> None:
    array = numbers((31, 17))
    target = new(host, distribution_of(name, array.shape))
    for region in (Region(0, 5, 0, 17), Region(5, 31, 0, 1), Region(5, 31, 1, 17)):
        with MatrixWriter(gangs[route], target, region=region) as writer:
            rows, cols = slice(*region[:2]), slice(*region[2:])
            writer.write_block(array[rows, cols], (region.row0, region.col0))
    host.seal(target.matrix)
    assert np.array_equal(fetch(gangs[route], target), array)
    host.free(target.matrix)


def test_a_block_outside_of_the_region_of_a_transfer_is_refused(
    host: support.Host, gangs: dict[str, NodeConnections], route: str
) -> None:
    """Its ranks were not chosen: elements would be missing without a word."""
    with sealed(host, gangs[route], numbers((31, 17))) as target:
        for block in ((5, 8, 0, 17), (4, 5, 0, 17), (5, 6, 0, 3)):
            with (
                pytest.raises(Failure, match=r"not in the region \[5, 6, 3, 9\]") as caught,
                MatrixReader(gangs[route], target, region=Region(5, 6, 3, 9)) as reader,
            ):
                reader.read_block(np.empty(Region(*block).shape), (block[0], block[2]))
            assert caught.value.kind == "ShapeError"


def test_transfers_of_regions_on_different_nodes_do_not_wait_for_each_other(
    host: support.Host, gangs: dict[str, NodeConnections], route: str
) -> None:
    array = numbers((6, 5))  # rank r holds row r: node 0 has the first three rows
    with sealed(host, gangs[route], array) as target:
        with MatrixReader(gangs[route], target, region=Region(0, 3, 0, 5)):
            assert gangs[route].connection(0).lock.locked()
            with MatrixReader(gangs[route], target, region=Region(4, 6, 0, 5)) as reader:
                out = np.empty((2, 5))
                reader.read_block(out, (4, 0))
        assert np.array_equal(out, array[4:])
        assert set(reader.times) == {1}


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("shape", [(300, 2000), (70000, 3), (400000, 1), (1, 200000), (900, 513)])
@pytest.mark.parametrize("name", ["VC_STAR", "STAR_VR", "CIRC_CIRC"])
def test_blocks_larger_than_a_piece_of_a_stream_arrive_in_order(
    host: support.Host, gangs: dict[str, NodeConnections], name: str, shape: tuple[int, int],
    order: Any, route: str,
) -> None:  # fmt: skip
    array = np.asarray(np.arange(shape[0] * shape[1], dtype="float64").reshape(shape), order=order)
    with sealed(host, gangs[route], array, name, 2) as target:
        assert np.array_equal(fetch(gangs[route], target, np.empty_like(array)), array)
        other = np.empty(shape, order="F" if order == "C" else "C")
        assert np.array_equal(fetch(gangs[route], target, other), array)


def test_small_blocks_are_reported_for_joining(
    host: support.Host, gangs: dict[str, NodeConnections]
) -> None:
    rows, cols = (new(host, distribution_of(name, (4096, 4096))) for name in ("VC_STAR", "STAR_VC"))
    for target, low in ((rows, 32 * RANKS - 1), (cols, 31)):
        with MatrixWriter(gangs["near"], target) as writer:
            by_columns = np.empty((4096, 4096), order="F")
            assert not writer.is_small(by_columns[: low + 1])
            assert writer.is_small(by_columns[:low])  # too few elements of a column per rank
            assert writer.is_small(by_columns[:, :11])  # less than 64 KiB for each
            assert not writer.is_small(by_columns[:, :12])
            low_rows = np.zeros((2, 4096))
            assert writer.is_small(low_rows) == (copy_kernels.level() is None)
            assert writer.is_small(low_rows[:, :127])
            assert writer.is_small(low_rows.astype("f4"))  # NumPy casts
        with MatrixWriter(gangs["far"], target) as writer:
            assert writer.is_small(np.empty((1023, 1024), order="F"))
            assert not writer.is_small(np.empty((1024, 1024), order="F"))
            assert writer.is_small(np.empty((7, 1024)))  # joined without a copy if they are larger
            assert not writer.is_small(np.empty((8, 1024)))
        host.free(target.matrix)


def test_run_ahead_never_computes_two_results_at_a_time(
    gangs: dict[str, NodeConnections],
) -> None:
    """Two panels of a copy between nodes were read through one connection at the same time."""
    nodes = NodeConnections(gangs["near"].endpoints)
    busy = threading.Lock()

    def alone(number: int) -> bool:
        if not busy.acquire(blocking=False):
            return False
        time.sleep(0.01)
        busy.release()
        return True

    assert all(nodes.run_ahead(alone, range(5)))
    nodes.close()


def test_run_parallel_runs_an_action_for_each_number(gangs: dict[str, NodeConnections]) -> None:
    ranks = NodeConnections(gangs["near"].endpoints, threads=3)
    squares: dict[int, int] = {}
    ranks.run_parallel(lambda i: squares.__setitem__(i, i * i), range(2, 40))
    assert squares == {i: i * i for i in range(2, 40)}
    with pytest.raises(ZeroDivisionError):
        ranks.run_parallel(lambda i: 1 // i, [1, 0])
    ranks.close()
    with pytest.raises(Failure, match="closed"):
        ranks.run_parallel(print, range(3))


def test_run_ahead_computes_one_result_while_the_last_is_used(
    gangs: dict[str, NodeConnections],
) -> None:
    nodes = NodeConnections(gangs["near"].endpoints)
    begun = [threading.Event() for _ in range(4)]

    def square(i: int) -> int:
        begun[i].set()
        if i == 3:
            raise ZeroDivisionError
        return i * i

    results = nodes.run_ahead(square, range(4))
    for i in range(3):
        assert next(results) == i * i
        assert begun[i + 1].wait(10)
        assert not any(event.is_set() for event in begun[i + 2 :])
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(nodes.run_ahead(square, [2])) == [4]
    nodes.close()
    with pytest.raises(Failure, match="closed"):
        list(nodes.run_ahead(square, [0, 1]))


def put_rows(nodes: NodeConnections, target: TransferTarget, array: Array, rows: Array) -> None:
    """Send some rows of an array by their numbers, as a JVM does."""
    packed = rows.astype("<i8").tobytes()
    for number, node in enumerate(nodes.endpoints.nodes):
        ranks = list(range(node.first, node.first + node.count))
        parts = [
            array[np.ix_(group.rows, group.cols)].tobytes()
            for group in row_groups(target.distribution, ranks, rows)
        ]
        body = {"matrix": target.matrix, "ranks": ranks, "rows": packed}
        nodes.connection(number).open().send(Kind.PUT, body, b"".join(parts))
        nodes.connection(number).sync()


@pytest.mark.parametrize("name", ["VC_STAR", "STAR_VC", "MC_MR", "MD_STAR"])
def test_rows_may_be_sent_in_any_order(
    host: support.Host, gangs: dict[str, NodeConnections], name: str, route: str
) -> None:
    array = numbers((97, 31))
    target = new(host, distribution_of(name, array.shape))
    order = np.random.default_rng(3).permutation(len(array))
    for numbers_of_rows in np.array_split(order, 4):
        put_rows(gangs[route], target, array, np.sort(numbers_of_rows))
    host.seal(target.matrix)
    assert np.array_equal(fetch(gangs[route], target), array)
    host.free(target.matrix)


def test_rows_outside_of_the_matrix_are_refused(
    host: support.Host, gangs: dict[str, NodeConnections], route: str
) -> None:
    target = new(host, distribution_of("VC_STAR", (97, 31)))
    with pytest.raises(Failure, match="ascending numbers of rows of a 97 x 31 matrix") as caught:
        put_rows(gangs[route], target, numbers((98, 31)), np.array([3, 97]))
    assert caught.value.kind == "ShapeError"
    gangs[route].connection(0).close()
    host.free(target.matrix)


def test_a_fetch_of_few_rows_does_not_depend_on_the_size_of_the_matrix() -> None:
    """A first fetch maps no memory of ranks, and the endpoint touches the pages that it needs."""
    shapes = (5_000, 100), (1_000_000, 100)  # 4 MB and 800 MB
    with support.Host(2) as host:
        targets = [new(host, distribution_of("VC_STAR", shape, 2)) for shape in shapes]
        for target in targets:
            host.fill(target.matrix)
        best = [float("inf"), float("inf")]
        for _ in range(50):  # the best of many: the machine may be loaded
            for k, target in enumerate(targets):
                nodes = NodeConnections(host.endpoints("near"))
                out = np.empty((3, 100))
                start = time.perf_counter()
                with MatrixReader(nodes, target) as reader:
                    reader.read_block(out, (0, 0))
                best[k] = min(best[k], time.perf_counter() - start)
                assert np.array_equal(out, 1000.0 * np.arange(3)[:, np.newaxis] + np.arange(100))
                nodes.close()
        assert best[1] < 1.5 * best[0], best


# --- times and progress ---


def test_times_and_progress_add_up_to_the_bytes_of_the_matrix(
    host: support.Host,
    gangs: dict[str, NodeConnections],
    route: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "STEP_BYTES", 10_000)
    monkeypatch.setattr(transfers, "UNMAPPED_BYTES", 0)
    array = numbers((100, 100))
    target = new(host, distribution_of("VC_STAR", array.shape))
    moved: list[int] = []
    with MatrixWriter(gangs[route], target, moved.append) as writer:
        writer.write_block(array[:77], (0, 0))  # 62 KB: in steps
        rest = [
            ArrayBlock(array[i : i + 4], (i, 0)) for i in range(77, 97, 4)
        ]  # 3 KB: several in a step
        writer.write_blocks([*rest, ArrayBlock(array[97:], (97, 0))])
    assert sum(moved) == array.nbytes
    assert len(moved) > 8
    assert sum(times.nbytes for times in writer.times.values()) == array.nbytes
    assert set(writer.times) == {0, 1}  # by node
    wanted = "shared memory" if route == "near" else "TCP"
    assert {times.route for times in writer.times.values()} == {wanted}
    assert all(times.send_s > 0 for times in writer.times.values())
    if route == "far":
        assert all(t.serialize_s > 0 and t.receive_s > 0 for t in writer.times.values())
    host.seal(target.matrix)
    moved.clear()
    with MatrixReader(gangs[route], target, moved.append) as reader:
        reader.read_block(np.empty_like(array), (0, 0))
    assert sum(moved) == array.nbytes
    assert sum(times.nbytes for times in reader.times.values()) == array.nbytes
    assert all(times.receive_s > 0 for times in reader.times.values())
    host.free(target.matrix)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(211, 97), (3, 4000), (4000, 3)])
def test_steps_have_at_most_the_bytes_of_the_buffer(
    host: support.Host, gangs: dict[str, NodeConnections], shape: tuple[int, int], order: Any,
    route: str,
) -> None:  # fmt: skip
    array = np.asarray(numbers(shape), order=order)
    target, moved = new(host, distribution_of("MC_MR", shape)), list[int]()
    with MatrixWriter(gangs[route], target, moved.append, 1000) as writer:
        writer.write_block(array, (0, 0))
    host.seal(target.matrix)
    assert sum(moved) == array.nbytes
    assert max(moved) <= 1000
    assert len(moved) >= array.nbytes // 1000
    assert np.array_equal(fetch(gangs[route], target), array)
    part, received = np.empty((3, 2)), list[int]()
    with MatrixReader(gangs[route], target, received.append, 1) as reader:
        reader.read_block(part, (0, 1))
    assert received == 6 * [array.itemsize]  # at least an element
    assert np.array_equal(part, array[:3, 1:3])
    host.free(target.matrix)
