"""Mappings, connections and threads that remain after transfers."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mpi_workers.data import node_connections, transfers
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixWriter
from mpi_workers.failures import Failure
from tests.mpi_workers.transfers import (
    RANKS,
    SINGLE,
    WAIT_S,
    Array,
    distribution_of,
    fetch,
    new,
    numbers,
    sealed,
    send,
)
from tests.support import ranks as support
from tests.support.traces import wait_until


def mappings() -> int:
    """How many mappings of ranks' memory this process has."""
    gc.collect()  # exceptions caught by earlier tests hold mappings in cycles
    return Path("/proc/self/maps").read_text().count("memfd:alchemist")


def test_mappings_are_kept_warm_and_dropped_when_they_are_idle(host: support.Host) -> None:
    distribution = distribution_of("VC_STAR", (500, 40), 2)
    ranks = NodeConnections(host.endpoints("near"))
    before = mappings()
    array = numbers(distribution.shape)
    for _ in range(3):  # the ranks reuse one segment, and so does the client
        target = new(host, distribution)
        send(ranks, target, (array, (0, 0)))
        assert mappings() == before + 2
        host.free(target.matrix)
    host.trim()  # the old mappings hold no pages now
    target = new(host, distribution)
    send(ranks, target, (array, (0, 0)))
    assert mappings() == before + 4
    host.seal(target.matrix)
    ranks.trim()
    assert mappings() == before
    assert np.array_equal(fetch(ranks, target), array)
    host.free(target.matrix)
    ranks.close()
    assert mappings() == before


def test_the_number_of_kept_mappings_is_bounded(host: support.Host) -> None:
    distribution = distribution_of("CIRC_CIRC", (100, 100), 1)
    ranks = NodeConnections(host.endpoints("near"))
    before = mappings()
    targets = [new(host, distribution) for _ in range(2 * node_connections.MAX_MAPPINGS)]
    for target in targets:
        send(ranks, target, (numbers(distribution.shape), (0, 0)))
    assert mappings() == before + node_connections.MAX_MAPPINGS
    ranks.close()
    assert mappings() == before
    for target in targets:
        host.free(target.matrix)


def test_idle_mappings_are_dropped(host: support.Host) -> None:
    array = numbers((500, 40))
    ranks = NodeConnections(host.endpoints("near"), idle_s=2.0)
    before, begun = mappings(), time.monotonic()
    with sealed(host, ranks, array, size=2) as target:
        assert mappings() == before + 2
        assert wait_until(lambda: mappings() == before, WAIT_S) is not None
        assert time.monotonic() - begun > 2
        assert np.array_equal(fetch(ranks, target), array)  # and a later transfer maps again
    ranks.close()


def test_a_mapping_in_use_survives_a_trim(host: support.Host) -> None:
    array = numbers((300, 20))
    target = new(host, distribution_of("VC_STAR", array.shape, 3))
    ranks = NodeConnections(host.endpoints("near"))
    with MatrixWriter(ranks, target) as writer:
        writer.write_block(array[:100], (0, 0))
        ranks.trim()
        writer.write_block(array[100:], (100, 0))
    host.seal(target.matrix)
    assert np.array_equal(fetch(ranks, target), array)
    ranks.close()
    host.free(target.matrix)


def test_a_client_with_too_many_open_files_says_so(
    host: support.Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "UNMAPPED_BYTES", 0)
    ranks = NodeConnections(host.endpoints("near"))
    array = numbers((500, 40))
    with sealed(host, ranks, array, size=2) as target:
        ranks.trim()
        kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(kept) + 1, limits[1]))
        try:
            with pytest.raises(Failure, match="this process has too many open files"):
                fetch(ranks, target)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in kept:
                os.close(fd)
        assert np.array_equal(fetch(ranks, target), array)
    ranks.close()


def test_closing_leaves_no_thread_and_no_connection(host: support.Host, route: str) -> None:
    # Threads of sessions in other tests may still end.
    known, fds = set(threading.enumerate()), host.fds()

    def ours() -> list[str]:
        started = set(threading.enumerate()) - known
        return [t.name for t in started if t.name.startswith("alchemist-")]

    ranks = NodeConnections(host.endpoints(route), threads=3)
    array = numbers((2000, 200))
    target = new(host, distribution_of("MC_MR", array.shape))
    send(ranks, target, (array, (0, 0)))
    assert ours()
    host.free(target.matrix)
    ranks.close()
    most = fds + 2 * RANKS  # the matrix's segments are kept warm (two each)
    assert wait_until(lambda: not ours() and host.fds() <= most, WAIT_S) is not None


def test_concurrent_transfers_do_not_mix(
    host: support.Host, gangs: dict[str, NodeConnections], route: str
) -> None:
    targets = [new(host, distribution_of(name, (211, 97))) for name in SINGLE[:4]]
    arrays = [numbers((211, 97), seed=k) for k in range(4)]

    def send_one(k: int) -> None:
        send(gangs[route], targets[k], (arrays[k], (0, 0)))

    def fetch_one(k: int) -> Array:
        return fetch(gangs[route], targets[k])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send_one, range(4)))
        for target in targets:
            host.seal(target.matrix)
        for found, array in zip(pool.map(fetch_one, range(4)), arrays, strict=True):
            assert np.array_equal(found, array)
    for target in targets:
        host.free(target.matrix)
