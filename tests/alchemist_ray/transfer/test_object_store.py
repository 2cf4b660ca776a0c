"""Matrices are sent and fetched unchanged."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    DtypeError,
    IncompleteMatrixError,
    MatrixNotFoundError,
    ShapeError,
    TransferError,
)
from alchemist_ray.transfer import object_store
from alchemist_ray.transfer.object_store import check_tiling, locate_objects
from mpi_workers.data.description import DataEndpoints
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.matrix.dtypes import DTYPES
from tests.alchemist_ray.conftest import refused
from tests.support.layouts import SOME_LAYOUTS

WORKERS = 2
RNG = np.random.default_rng(7)


def some(shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    values = RNG.standard_normal(shape) * 100
    if dtype.startswith("complex"):
        values = values + 1j * RNG.standard_normal(shape)
    return values.astype(dtype)


@pytest.mark.parametrize("gang", [1, 3, 4], indirect=True)
def test_every_layout_returns_what_was_sent(als: AlchemistSession) -> None:
    for layout in SOME_LAYOUTS:
        for shape in ((13, 9), (2, 3), (1, 1), (50, 1), (1, 40), (31,), (0, 3), (3, 0), (0,)):
            matrix = some(shape)
            handle = als.send_matrix(matrix, layout=layout)
            assert (handle.shape, handle.layout, handle.dtype) == (shape, layout, matrix.dtype)
            np.testing.assert_array_equal(handle.fetch(), matrix)
            handle.free()
    assert als.list_matrices() == []


def test_every_dtype_and_special_float_values(als: AlchemistSession) -> None:
    for dtype in DTYPES:
        matrix = some((20, 6), dtype)
        if matrix.dtype.kind in "fc":
            matrix[3, 2], matrix[4, 1], matrix[5, 5] = np.nan, np.inf, -np.inf
        fetched = als.send_matrix(matrix).fetch()
        assert fetched.dtype == matrix.dtype
        assert fetched.tobytes() == matrix.tobytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a.T,
        lambda a: a[::-2, ::3],
        lambda a: np.asfortranarray(a),
        lambda a: np.broadcast_to(a[:1], (7, a.shape[1])),
        lambda a: a.astype(">f8"),
        lambda a: a.view(np.matrix) if False else a[5:6],
        lambda a: a[:, 3],
        lambda a: a.tolist(),
    ],
    ids=["transposed", "strided", "fortran", "read-only", "big-endian", "one-row", "1-D", "list"],
)
def test_arrays_of_any_memory_layout_are_sent(als: AlchemistSession, make) -> None:
    source = make(some((41, 30)))
    fetched = als.send_matrix(source, layout="MC_MR").fetch()
    expected = np.asarray(source, dtype=float)
    np.testing.assert_array_equal(fetched, expected)
    assert fetched.dtype == np.dtype("float64")


def test_a_dtype_can_be_asked_for(als: AlchemistSession) -> None:
    image = RNG.integers(0, 255, (30, 20), dtype=np.uint8)
    handle = als.send_matrix(image, dtype="float32")
    assert handle.dtype == np.float32
    np.testing.assert_array_equal(handle.fetch(), image)


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[D]", ">M8[us]"])
def test_dates_keep_their_dtype(session: AlchemistSession, dtype: str) -> None:
    dates = np.array([[1, 2], [3, "NaT"]], dtype)
    block = [(ray.put(dates), 0, 0)]
    for handle in (session.send_matrix(dates), session.send_matrix(block)):
        assert handle.dtype == np.dtype(dtype.strip(">"))
        np.testing.assert_array_equal(handle.fetch(), dates)
        assert handle.astype("int64").dtype == np.int64


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (np.array([["a", "b"]]), DtypeError, "not numbers"),
        (np.array([[object()]]), DtypeError, "not numbers"),
        (np.zeros((1,) * 9), ShapeError, "more than 8 axes"),
        (np.zeros((2, 2), np.longdouble), DtypeError, "dtype='float64'"),
        (np.zeros((2, 2), np.clongdouble), DtypeError, "dtype='complex128'"),
        ([[1.0, 2.0], [3.0]], ShapeError, "matrix"),
        ("a string", DtypeError, "load_matrix"),
        (None, DtypeError, "NoneType"),
        ({1: 2}, DtypeError, "dict"),
        (np.ma.masked_less(np.arange(4.0).reshape(2, 2), 1), DtypeError, "masked"),
        ([np.arange(2.0), np.ma.masked_less(np.arange(2.0), 1)], DtypeError, "masked"),
    ],
)
def test_input_that_is_not_a_matrix_is_refused_before_sending(
    als: AlchemistSession, source: object, error: type, words: str
) -> None:
    refused(als, source, error, words)


def test_a_freed_handle_is_refused(als: AlchemistSession) -> None:
    handle = als.send_matrix(np.eye(2))
    handle.free()
    for call in (handle.fetch, lambda: handle.to_layout("MC_MR")):
        with pytest.raises(MatrixNotFoundError):
            call()


def test_parts_are_fetched_like_slices(als: AlchemistSession) -> None:
    matrix = some((40, 30))
    handle = als.send_matrix(matrix, layout="MC_MR")
    for key in (
        (slice(3, 17), slice(None)), (slice(None), slice(5, 6)), (slice(-4, None), slice(2, 20, 3)),
        (slice(30, 2, -5), slice(None, None, -1)), (slice(10, 10), slice(None)),
    ):  # fmt: skip
        np.testing.assert_array_equal(handle.fetch(*key), matrix[key])
    np.testing.assert_array_equal(handle.fetch(7), matrix[7:8])
    np.testing.assert_array_equal(handle.fetch(-1, 2), matrix[-1:, 2:3])
    np.testing.assert_array_equal(handle.fetch(rows=slice(2, 4)), matrix[2:4])


def test_a_fetched_array_belongs_to_the_user(als: AlchemistSession) -> None:
    matrix = some((700, 500))  # large enough for pooled memory
    handle = als.send_matrix(matrix)
    first = handle.fetch()
    first[:] = 0
    second = handle.fetch()
    np.testing.assert_array_equal(second, matrix)
    assert not np.shares_memory(first, second)
    view = second[3:5]
    del second
    third = handle.fetch()
    third[:] = -1
    np.testing.assert_array_equal(view, matrix[3:5])


def test_blocks_in_the_object_store(als: AlchemistSession, senders: None) -> None:
    matrix = some((120, 90))
    rows, cols = [0, 50, 51, 120], [0, 7, 90]
    blocks = [
        (ray.put(matrix[r0:r1, c0:c1]), r0, c0)
        for r0, r1 in pairwise(rows)
        for c0, c1 in pairwise(cols)
    ]
    for layout in ("VC_STAR", "STAR_VC", "STAR_STAR"):
        handle = als.send_matrix(blocks[::-1], layout=layout, print_times=True)
        np.testing.assert_array_equal(handle.fetch(), matrix)


def test_blocks_that_tasks_make(als: AlchemistSession, senders: None) -> None:
    @ray.remote
    def block(i: int) -> np.ndarray:
        return np.full((200, 60), float(i))

    handle = als.send_matrix([(block.remote(i), 200 * i, 0) for i in range(3)])
    expected = np.repeat([0.0, 1.0, 2.0], 200)[:, None] + np.zeros(60)
    np.testing.assert_array_equal(handle.fetch(), expected)


def test_blocks_of_arrays_of_more_axes(als: AlchemistSession, senders: None) -> None:
    whole = np.random.default_rng(2).integers(0, 255, (50, 3, 2, 4)).astype("uint8")
    blocks = [(ray.put(whole[i : i + 20]), i, 0) for i in range(0, 50, 20)]
    for layout in ("VC_STAR", "MC_MR"):
        handle = als.send_matrix(blocks[::-1], layout=layout)
        assert handle.dtype == whole.dtype
        np.testing.assert_array_equal(handle.fetch(), whole)


def test_blocks_that_make_no_matrix_are_refused(als: AlchemistSession, senders: None) -> None:
    ref, cube = ray.put(np.eye(3)), ray.put(np.zeros((2, 3, 4)))
    for blocks, error, words in (
        ([(ref, 0, 0), (ref, 4, 0)], IncompleteMatrixError, "in no block"),
        ([(ref, 0, 0), (ref, 2, 0)], IncompleteMatrixError, "overlap"),
        ([(ref, 0, 0), (ref, 0, 1)], IncompleteMatrixError, "overlap"),
        ([(ref, 1, 0)], IncompleteMatrixError, "rows 0 to 1"),
        ([(ref, 0, 0), (ref, -3, 0)], ShapeError, "row >= 0"),
        ([(ref, 0, 0), (ref, 3)], ShapeError, "block 1"),
        ([(ref, 0)], ShapeError, "block 0 is .* not .ObjectRef, row"),
        ([ref], ShapeError, "block 0 is .* not .ObjectRef, row"),
        ([(ref, 0.5, 0)], ShapeError, "block 0 is .* not .ObjectRef, row"),
        ([(np.eye(3), 0, 0)], ShapeError, "the first one has a ndarray: ray.put"),
        ([(ray.put(np.zeros((1,) * 9)), 0, 0)], ShapeError, "block 0: it has shape .* one to 8"),
        ([(cube, 0, 0), (cube, 2, 1)], ShapeError, r"block 1 has shape \(2, 3, 4\) and column 1"),
        ([(ref, 0, 0), (cube, 3, 0)], ShapeError, r"block 1 has shape .*differ only in the length"),
        ([(cube, 0, 0), (cube, 3, 0)], IncompleteMatrixError, "rows 2 to 3"),
        ([(ray.put([[None]]), 0, 0)], DtypeError, "block 0"),
        (ref, ShapeError, "list of"),
    ):
        refused(als, blocks, error, words)
    assert als.list_matrices() == []


def test_a_task_that_fails_is_named(als: AlchemistSession, senders: None) -> None:
    @ray.remote
    def broken() -> np.ndarray:
        raise RuntimeError("no data today")

    with pytest.raises(TransferError, match=r"block 0 could not be computed.*no data today"):
        als.send_matrix([(broken.remote(), 0, 0)])
    assert als.list_matrices() == []


@given(st.data())
@settings(max_examples=200)
def test_tiling_is_accepted_only_where_blocks_cover_exactly_once(data: st.DataObject) -> None:
    """Cut a matrix at random, then maybe damage the cut: the check agrees with counting."""
    m, n = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    rows = sorted({0, m, *data.draw(st.lists(st.integers(0, m), max_size=3))})
    blocks = []
    for r0, r1 in pairwise(rows):
        cols = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))})
        blocks += [((r0, c0), (r1 - r0, c1 - c0)) for c0, c1 in pairwise(cols)]
    if data.draw(st.booleans()) and len(blocks) > 1:
        k = data.draw(st.integers(0, len(blocks) - 1))
        damage = data.draw(st.sampled_from(["drop", "double", "move"]))
        (r, c), size = blocks[k]
        if damage == "drop":
            del blocks[k]
        elif damage == "double":
            blocks.append(blocks[k])
        else:
            blocks[k] = ((r, c + 1), size)
    shape = (max(r + h for (r, _), (h, _) in blocks), max(c + w for (_, c), (_, w) in blocks))
    count = np.zeros(shape, int)
    for (r, c), (h, w) in blocks:
        count[r : r + h, c : c + w] += 1
    origins, sizes = [o for o, _ in blocks], [s for _, s in blocks]
    if (count == 1).all():
        check_tiling(shape, origins, sizes)
    else:
        with pytest.raises(IncompleteMatrixError):
            check_tiling(shape, origins, sizes)


def test_a_handle_works_in_a_task(als: AlchemistSession) -> None:
    matrix = some((60, 5))
    handle = als.send_matrix(matrix)

    @ray.remote
    def use(h) -> tuple[float, object]:
        return float(h.fetch(rows=slice(0, 2)).sum()), h.to_layout("STAR_STAR")

    total, other = ray.get(use.remote(handle))
    assert total == pytest.approx(matrix[:2].sum())
    np.testing.assert_array_equal(other.fetch(), matrix)


def test_times_are_printed_per_node(als: AlchemistSession, capsys) -> None:
    handle = als.send_matrix(some((100, 10)), print_times=True)
    handle.fetch(print_times=True)
    told = capsys.readouterr().out
    assert told.count("Data transfer times breakdown") == 2
    assert told.count("shared memory") == 2
    assert "serialize" in told
    assert "deserialize" in told


def test_a_gang_that_is_reached_by_streams_only(als: AlchemistSession) -> None:
    """A process on another node has no Unix sockets: it streams."""
    client = als.connection
    endpoints = client.endpoints
    nodes = (replace(node, addresses=node.addresses[1:]) for node in endpoints.nodes)
    far = DataEndpoints(endpoints.token, tuple(nodes))
    near, client.nodes = client.nodes, NodeConnections(far)
    try:
        matrix = some((333, 77), "complex64")
        for layout in ("VC_STAR", "STAR_VC", "MC_MR", "CIRC_CIRC"):
            handle = als.send_matrix(matrix, layout=layout)
            np.testing.assert_array_equal(handle.fetch(), matrix)
        assert client.nodes.connection(0).route == "TCP"
    finally:
        client.nodes.close()
        client.nodes = near


def test_locations_are_requested_from_each_owner(gang: AlchemistSession) -> None:
    """Asked for together, Ray sometimes ends this process: an owner may answer too early."""

    @ray.remote(num_cpus=0)
    class Owner:
        def put(self) -> list[ray.ObjectRef]:
            self.kept = [ray.put(np.zeros(20_000)) for _ in range(3)]
            return self.kept

    owners = [Owner.remote() for _ in range(2)]
    theirs = [ref for owner in owners for ref in ray.get(owner.put.remote())]
    mine = [ray.put(np.zeros(20_000)) for _ in range(3)]
    refs = [ref for three in zip(theirs[:3], mine, theirs[3:], strict=True) for ref in three]
    asked = list(object_store._queries(refs))
    assert sorted(map(len, asked)) == [3, 3, 3]
    assert {ref for some in asked for ref in some} == set(refs)
    assert all(len({ref.owner_address() for ref in some}) == 1 for some in asked)
    assert all(held.nbytes >= 160_000 for held in locate_objects(refs))


def test_bfloat16_is_widened_on_request(als: AlchemistSession) -> None:
    kinds = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    narrow = np.arange(12.0).reshape(4, 3).astype(kinds.bfloat16)
    refused(als, narrow, DtypeError, "dtype='float32'")
    wide = als.send_matrix(narrow, dtype="float32")
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide.fetch(), narrow.astype(np.float32))
