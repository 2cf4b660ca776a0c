"""Processes that ranks start, ports that MPI opens, and libraries that load on some ranks."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from alchemist_ray.errors import AlchemistError
from tests.faults.conftest import (
    ERROR_LIMIT_S,
    Gang,
    assert_clean,
    inject_and_retry,
    inject_during,
    kill,
    record,
)
from tests.support import traces
from tests.support.traces import listening_ports

pytestmark = pytest.mark.timeout(60, func_only=True)


def start_child(comm: Any, rank: int) -> int:
    """Fork a child that keeps all sockets of its rank, and leaves its session."""
    child = 0
    if comm.rank == rank:
        child = os.fork()
        if child == 0:
            os.setsid()
            time.sleep(100)
            os._exit(0)
    found: int = comm.bcast(child, rank)
    return found


def start_orphan(comm: Any, rank: int) -> int:
    """Start a process whose parent ends, as daemons do."""
    pid = 0
    if comm.rank == rank:
        command = "sleep 100 > /dev/null 2>&1 & echo $!"
        done = subprocess.run(
            ["setsid", "sh", "-c", command], stdout=subprocess.PIPE, check=True, text=True
        )
        pid = int(done.stdout)
    found: int = comm.bcast(pid, rank)
    return found


@pytest.mark.cell("rank", "in a call", "private, mpiexec", "lost")
@pytest.mark.cell("rank", "idle", "private", "lost")
@pytest.mark.parametrize(("launcher", "idle"), [("pmi", False), ("pmi", True), ("mpiexec", False)])
def test_a_killed_rank_is_noticed_though_its_child_holds_its_sockets(
    bystander: Gang, launcher: str, idle: bool
) -> None:
    gang = Gang(2, launcher=launcher)
    child = gang.session.run(start_child, 1)
    assert traces.alive(child)
    words = ["rank 1"]
    if launcher == "pmi":
        words += ["SIGKILL", str(gang.ranks[1])]
    cause = lambda: kill(gang.ranks[1])  # noqa: E731
    if idle:
        outcome = inject_and_retry(cause, gang.session.list_workers)
    else:
        outcome = inject_during(cause, lambda: gang.lib.collective(missing=1))
    gang.lost(f"kill -9 of a rank whose child holds its sockets, {launcher}", outcome, *words)
    assert not traces.alive(child)
    gang.close()


def test_descendants_of_ranks_end_with_the_gang(bystander: Gang) -> None:
    gang = Gang(2)
    processes = [gang.session.run(start_child, 0), gang.session.run(start_orphan, 1)]
    assert all(map(traces.alive, processes))
    gang.close()
    assert not any(map(traces.alive, processes))


def test_descendants_of_ranks_end_when_their_proxy_is_killed(gang: Gang) -> None:
    processes = [gang.session.run(start_child, 0), gang.session.run(start_orphan, 1)]
    outcome = inject_and_retry(lambda: kill(gang.proxy), gang.session.list_workers)
    gang.lost("kill -9 of a proxy whose ranks have children", outcome, "was lost")
    assert (
        traces.wait_until(lambda: not any(map(traces.alive, processes)), ERROR_LIMIT_S) is not None
    )


@pytest.mark.cell("rank", "in a call", "mpiexec", "lost")
def test_mpi_abort_in_a_gang_of_mpiexec_names_its_rank(bystander: Gang) -> None:
    gang = Gang(3, launcher="mpiexec")
    outcome = inject_and_retry(lambda: None, lambda: gang.lib.abort(1, 7))
    gang.lost("MPI_Abort in a gang of mpiexec", outcome, "rank 1", "MPI_Abort(7)")
    gang.close()


@pytest.mark.parametrize("launcher", ["pmi", "mpiexec"])
def test_a_gang_on_one_node_opens_no_port_of_mpi(bystander: Gang, launcher: str) -> None:
    gang = Gang(2, launcher=launcher)
    gang.lib.churn(0.2)
    for worker in gang.session.list_workers():
        assert listening_ports(worker.pid) == []
        assert listening_ports(traces.parent_of(worker.pid)) == []  # the proxy, or mpiexec
        if launcher == "pmi":
            (port,) = listening_ports(gang.endpoint)  # the authenticated one for data
            assert int(port.rpartition(":")[2], 16) == int(worker.address.rpartition(":")[2])
    gang.close()


@pytest.mark.cell("proxy", "in a call", "private", "lost")
def test_a_gang_whose_ranks_and_proxy_are_killed_leaves_no_shared_memory(gang: Gang) -> None:
    def segments() -> set[str]:
        lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        keys = {line.split()[1] for line in lines if int(line.split()[4]) in gang.ranks}
        return keys | {path.name for path in traces.shared_memory()}

    def kill_all() -> None:
        for pid in (gang.proxy, *gang.ranks):
            kill(pid)

    outcome = inject_during(kill_all, lambda: gang.lib.churn(30.0))
    ranks, error = list(gang.ranks), outcome.error
    assert isinstance(error, AlchemistError)
    assert traces.wait_until(lambda: not any(map(traces.alive, ranks)), ERROR_LIMIT_S) is not None
    assert traces.wait_until(lambda: not segments(), ERROR_LIMIT_S) is not None, segments()
    gone_s = assert_clean(gang.before)
    record("kill -9 of a proxy and all its ranks", outcome.seconds, gone_s, error)
    gang.again()


def test_a_library_that_loads_on_some_ranks_replaces_the_old_one_on_none(
    gang: Gang, tmp_path: Path
) -> None:
    path = tmp_path / "version.py"
    source = (
        "from ali import Context, routine\n"
        "{extra}\n"
        '@routine("version")\n'
        "def version(ctx: Context) -> int:\n"
        '    "The sum over the ranks."\n'
        "    return ctx.comm.allreduce({number})\n"
    )
    path.write_text(source.format(extra="", number=1))
    old = gang.session.load_library("version", path)
    assert old.version() == 3
    fails = "import os\nif int(os.environ['PMI_RANK']) == 1: raise OSError('rank 1 cannot read')"
    path.write_text(source.format(extra=fails, number=100))
    start = time.monotonic()
    with pytest.raises(AlchemistError, match="rank 1 cannot read") as caught:
        gang.session.load_library("version", path)
    record("a library that loads on some ranks", time.monotonic() - start, None, caught.value)
    assert caught.value.facts["rank"] == 1
    assert old.version() == 3  # on every rank
    assert old.version() == 3
    path.write_text(source.format(extra="", number=2))
    assert gang.session.load_library("version", path).version() == 6
