"""Six ranks on two nodes and the routes to them; a folder for sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_workers.data.node_connections import NodeConnections
from tests.mpi_workers.transfers import RANKS
from tests.support import ranks as support


@pytest.fixture(scope="module")
def host() -> Iterator[support.Host]:
    with support.Host(RANKS, nodes=2) as host:
        yield host
        assert host.unhandled() == []


@pytest.fixture(scope="module")
def gangs(host: support.Host) -> Iterator[dict[str, NodeConnections]]:
    """Connections to the nodes through shared memory and, all the way, over TCP."""
    found = {route: NodeConnections(host.endpoints(route), threads=2) for route in ("near", "far")}
    yield found
    for ranks in found.values():
        ranks.close()


@pytest.fixture(params=["near", "far"])
def route(request: pytest.FixtureRequest) -> str:
    """The key of `gangs` for a test of both."""
    return str(request.param)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="wire-") as path:
        yield Path(path)
