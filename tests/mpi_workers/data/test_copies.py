"""A matrix is copied into another one, from rank to rank, over every route."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.node_shares import Region
from tests.mpi_workers.transfers import COPIED, SINGLE, distribution_of, fetch, new, numbers, sealed
from tests.support import ranks as support


@pytest.fixture(scope="module")
def others(host: support.Host) -> Iterator[dict[str, NodeConnections]]:
    """Connections to read over: as those to another gang, they have locks of their own."""
    found = {route: NodeConnections(host.endpoints(route), threads=2) for route in ("near", "far")}
    yield found
    for ranks in found.values():
        ranks.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_layouts_and_numbers_of_ranks(
    host: support.Host,
    gangs: dict[str, NodeConnections],
    others: dict[str, NodeConnections],
    data: st.DataObject,
) -> None:
    shape = data.draw(st.tuples(st.integers(0, 60), st.integers(0, 60)), "shape")
    layouts = data.draw(st.sampled_from([*SINGLE, *COPIED])), data.draw(st.sampled_from(SINGLE))
    sizes = data.draw(st.integers(1, 6), "ranks"), data.draw(st.integers(1, 6), "other ranks")
    routes = data.draw(st.sampled_from([("near", "near"), ("near", "far"), ("far", "near")]))
    array = numbers(shape, data.draw(st.sampled_from(DTYPES), "dtype"))
    cut = data.draw(st.integers(0, shape[1]), "cut")
    with sealed(host, gangs["near"], array, layouts[0], sizes[0]) as source:
        target = new(host, distribution_of(layouts[1], shape, sizes[1]), array.dtype)
        for first, stop in ((0, cut), (cut, shape[1])):
            region = Region(0, shape[0], first, stop)
            with (
                MatrixReader(others[routes[0]], source, region=region) as reader,
                MatrixWriter(gangs[routes[1]], target, region=region) as writer,
            ):
                writer.copy_from(reader, region)
        host.seal(target.matrix)  # each element was counted once
        assert np.array_equal(fetch(gangs["near"], target), array)
        host.free(target.matrix)
