"""A gang over two hosts, and what happens when one of them, or the link, is lost.

One cluster for all tests, which follow each other: the last ones leave it in pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpi_workers.data import node_connections
from tests.faults.conftest import ERROR_LIMIT_S, needs_hosts, record
from tests.faults.hosts import Host, Hosts
from tests.mpi_workers import waits
from tests.support import traces
from tests.support.build import needs_compiler, shared_object

pytestmark = needs_hosts(100)

LINK_S = 10.0  # a cut link is noticed within
RANKS = 4
TRIES = 5  # a rank that has not begun to wait when its call ends is not replaced
INSIDE = "tests.faults.inside"


class Pair:
    """Two hosts with a cluster, a gang over both and one on the first alone."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.folder = folder
        self.near, self.far = hosts[0], hosts[1]
        # The program that started all our actors has ended.
        assert self.call("join", 2, limit_s=40) == 2
        self.call("request", "first", 1)
        self.near.leave()
        assert self.call("join", 2) == 2
        # 3 CPUs in a row are on the first host only; then both have 2.
        self.bystander = [worker["pid"] for worker in self.call("request", "bystander", 3)]
        self.start()

    def call(self, function: str, *arguments: Any, limit_s: float = 30.0) -> Any:
        return self.near.call(f"{INSIDE}:{function}", *arguments, limit_s=limit_s)

    def start(self) -> None:
        """Start the gang (again)."""
        self.workers = self.call("request", "gang", RANKS)

    def pid(self, rank: int) -> int:
        return self.workers[rank]["pid"]

    def on(self, host: Host) -> list[int]:
        """The gang's ranks on a host."""
        return [worker["rank"] for worker in self.workers if worker["host"] == host.name]

    def unharmed(self) -> bool:
        """Check that the gang on the first host is unaffected."""
        assert self.call("pids", "bystander") == self.bystander
        assert self.call("total", "bystander") == 3
        return True


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("waiting")
    with Hosts(2, shared=[folder]) as hosts:
        hosts.start_ray([5, 2])
        yield Pair(hosts, folder)


def inject_during(
    pair: Pair, meanwhile: str, cause: Callable[[], Any], limit_s: float
) -> tuple[dict[str, Any], float]:
    """Cause the fault during this work of the gang; the error and the seconds until then."""
    pair.near.begin(f"{INSIDE}:until_lost", "gang", meanwhile)
    time.sleep(1.0)
    start = traces.clock()
    cause()
    outcome = pair.near.result(limit_s + 10)
    return outcome, outcome["at"] - start


def gone(pair: Pair, host: Host, since: float, limit_s: float) -> float:
    """Wait until the gang's processes on a host have ended; return the seconds after `since`."""
    waited = traces.wait_until(lambda: not left_on(pair, host), limit_s, 0.1)
    assert waited is not None, f"left on {host.name}: {left_on(pair, host)}"
    return time.monotonic() - since


def left_on(pair: Pair, host: Host) -> list[int]:
    """The gang's ranks that still run on a host."""
    running = set(host.pids("mpi_workers"))
    return [pair.pid(rank) for rank in pair.on(host) if pair.pid(rank) in running]


def test_a_gang_spans_two_hosts(pair: Pair) -> None:
    assert [worker["rank"] for worker in pair.workers] == list(range(RANKS))
    assert len(pair.on(pair.near)) == len(pair.on(pair.far)) == 2
    assert pair.call("total", "gang") == 6
    assert pair.unharmed()


def test_matrices_reach_both_hosts_and_come_back_unchanged(pair: Pair) -> None:
    found = pair.call("round_trips", "gang")
    assert all(found["equal"].values()), found["equal"]
    lines = found["times"].splitlines()
    for route in ("shared memory", "TCP"):  # to the near host's node, and to the far one's
        assert any(route in line for line in lines), lines
    assert pair.call("large_round_trip", "gang", 200_000)["equal"]


def test_blocks_on_both_hosts_are_sent_from_where_they_are(pair: Pair) -> None:
    found = pair.call("blocks", "gang")
    assert found["hosts"] == sorted([pair.near.name, pair.far.name])
    assert found["equal"]


@pytest.mark.parametrize("gang", ["gang", "bystander"])  # on both hosts; on the near one
def test_200_chunks_on_the_far_host_reach_a_gang(pair: Pair, gang: str) -> None:
    pytest.importorskip("dask.array", reason="needs alchemist-on-ray[dask]")
    found = pair.call("dask_blocks", gang, pair.far.ip, 200)
    assert found["host"] == pair.far.name
    assert found["equal"]
    # Its agent sends all chunks through the same streams: no connection for each.
    assert found["opened"] <= node_connections.STREAMS_PER_NODE


def test_a_product_is_computed_across_the_hosts(pair: Pair) -> None:
    assert pair.call("product", "gang") < 1e-10


def test_a_library_that_one_host_does_not_have_is_reported(pair: Pair) -> None:
    kind, message = pair.call("load_own_file", "gang")
    assert kind == "LibraryNotFoundError"
    assert f"on node {pair.far.name}" in message
    assert pair.call("total", "gang") == 6


@needs_compiler
def test_native_waits_for_a_rank_of_another_host_end_with_their_call(pair: Pair) -> None:
    library = shared_object(Path(waits.__file__).with_name("waiting.c"), pair.folder / "waiting.so")
    expected = {"error": "RoutineError", "Ctrl-C": "KeyboardInterrupt", "limit": "CallTimeoutError"}
    for how in ("Allreduce", "Recv"):
        for fault, kind in expected.items():
            for _ in range(TRIES):
                found = pair.call("waited", "gang", str(library), fault, how)
                assert found["kind"] == kind, found
                assert found["seconds"] < 0.3 + ERROR_LIMIT_S, found
                assert pair.call("total", "gang") == 6
                # C code may not have looked at the error of its wait: both hosts have other ranks.
                before, pair.workers = pair.workers, pair.call("workers", "gang")
                same = [worker for worker in pair.workers if worker in before]
                if not same:
                    break
            assert not same, (how, fault)


@pytest.mark.cell("rank", "in a call", "private", "renewed")
@pytest.mark.parametrize("where", ["far", "near"])
def test_a_killed_rank_costs_one_call_on_both_hosts(pair: Pair, where: str) -> None:
    host: Host = getattr(pair, where)
    rank = pair.on(host)[-1]
    pair.call("keep", "gang")
    start = time.monotonic()
    outcome, seconds = inject_during(
        pair, "in MPI", lambda: host.signal(pair.pid(rank)), ERROR_LIMIT_S
    )
    assert outcome["kind"] == "GroupRecoveredError"
    for word in (f"rank {rank} ", "SIGKILL", host.name):
        assert word in outcome["message"]
    assert seconds < ERROR_LIMIT_S
    gone_s = max(gone(pair, each, start + 1.0, ERROR_LIMIT_S) for each in (pair.near, pair.far))
    pair.workers = pair.call("workers", "gang")
    assert pair.call("kept", "gang")
    record(f"2 hosts: kill -9 of a {where} rank", seconds, gone_s, outcome["kind"])
    assert pair.unharmed()
    assert pair.call("total", "gang") == 6


@pytest.mark.cell("network", "in a call", "private", "goes on")
def test_a_gang_survives_a_short_break_of_the_link(pair: Pair) -> None:
    pair.near.begin(f"{INSIDE}:churn", "gang", 3.0)
    time.sleep(0.5)
    pair.far.cut()
    time.sleep(2.0)
    pair.far.mend()
    assert pair.near.result(20) == "done"
    assert pair.call("total", "gang") == 6


@pytest.mark.cell("network", "in a call", "private", "lost")
@pytest.mark.parametrize("meanwhile", ["in MPI", "sending", "sent functions"])
def test_a_cut_link_ends_the_gang_on_both_sides(pair: Pair, meanwhile: str) -> None:
    start = time.monotonic()
    outcome, seconds = inject_during(pair, meanwhile, pair.far.cut, LINK_S)
    try:
        assert outcome["kind"] == "GroupFailedError"
        assert pair.far.name in outcome["message"]
        assert "network" in outcome["message"]
        assert seconds < LINK_S
        gone_s = max(gone(pair, host, start + 1.0, LINK_S) for host in (pair.near, pair.far))
        record(f"2 hosts: the link is cut, gang {meanwhile}", seconds, gone_s, outcome["kind"])
        assert pair.unharmed()
    finally:
        pair.far.mend()
    pair.start()
    assert pair.call("total", "gang") == 6


def test_a_gang_outlives_the_far_raylet(pair: Pair) -> None:
    """Ray has ended on that host, but the gang depends on its GroupManager only."""
    for pid in pair.far.pids("raylet/raylet"):
        pair.far.signal(pid)
    gone_s = traces.wait_until(lambda: not pair.far.pids("ray::"), 6 * LINK_S, 0.1)
    assert gone_s is not None, pair.far.run("ps", "-ww", "-eo", "pid=,ppid=,stat=,etimes=,args=")
    assert pair.call("pids", "gang") == [worker["pid"] for worker in pair.workers]
    assert pair.call("total", "gang") == 6
    assert pair.call("run_function", "gang", limit_s=60) == len(pair.workers)
    assert pair.unharmed()


@pytest.mark.cell("host", "in a call", "private", "lost")
def test_a_host_that_is_lost_ends_the_gang(pair: Pair) -> None:
    outcome, seconds = inject_during(pair, "in MPI", pair.far.kill, LINK_S)
    assert outcome["kind"] == "GroupFailedError"
    assert pair.far.name in outcome["message"]
    assert seconds < LINK_S
    gone_s = gone(pair, pair.near, time.monotonic() - seconds, ERROR_LIMIT_S)
    record("2 hosts: the far host is lost", seconds, gone_s, outcome["kind"])
    assert pair.unharmed()
    pair.call("close", "gang")
    assert len(pair.call("request", "next", 2)) == 2
    assert pair.call("total", "next") == 1
