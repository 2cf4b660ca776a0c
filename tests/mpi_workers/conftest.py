"""Six ranks and the routes to them; a folder for sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_workers.data.rank_connections import RankConnections
from tests.support import ranks as support
from tests.support.transfers import RANKS


@pytest.fixture(scope="module")
def host() -> Iterator[support.Host]:
    with support.Host(RANKS) as host:
        yield host
        assert host.unhandled() == []


@pytest.fixture(scope="module")
def gangs(host: support.Host) -> Iterator[dict[str, RankConnections]]:
    """Connections to the ranks through shared memory and, all the way, over TCP."""
    found = {
        route: RankConnections(host.rank_endpoints(route), threads=2) for route in ("near", "far")
    }
    yield found
    for ranks in found.values():
        ranks.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="wire-") as path:
        yield Path(path)
