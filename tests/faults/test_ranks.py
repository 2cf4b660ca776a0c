"""A rank is killed or raises, idle or in MPI; its children, ports and libraries."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from alchemist_ray.errors import AlchemistError, GroupRecoveredError, RoutineError
from tests.faults.conftest import (
    ERROR_LIMIT_S,
    Gang,
    NewGang,
    assert_clean,
    inject_and_retry,
    inject_during,
    kill,
    record,
    until_replaced,
)
from tests.support import traces
from tests.support.build import library
from tests.support.traces import listening_ports


@pytest.mark.cell("rank", "in a call", "private", "renewed")
def test_a_call_through_ray_fails_with_a_killed_rank(gang: Gang) -> None:
    outcome = inject_during(
        lambda: kill(gang.ranks[1]), lambda: ray.get(gang.lib.collective.remote(missing=1))
    )
    # Ray wraps the error of a task in a class that derives from Ray's and from ours.
    assert isinstance(outcome.error, GroupRecoveredError), repr(outcome.error)
    outcome.error = outcome.error.cause if hasattr(outcome.error, "cause") else outcome.error
    gang.renewed("kill -9 of a rank, called with .remote()", outcome, "rank 1", "SIGKILL")


def leave(comm: Any) -> None:
    if comm.rank == 1:
        os.write(2, b"I cannot go on")
        os._exit(3)
    comm.Barrier()


@pytest.mark.cell("rank", "in a call", "private", "renewed")
@pytest.mark.parametrize(
    ("fault", "call", "words"),
    [
        (
            "segfault in a rank",
            lambda gang: gang.lib.segfault(1),
            "rank 1|SIGSEGV|in breaking.segfault|it crashed in|segfault (breaking.py:",
        ),
        ("MPI_Abort", lambda gang: gang.lib.abort(2, 7), "rank 2|MPI_Abort(7)"),
        ("os._exit in a rank", lambda gang: gang.lib.leave(1, 3), "rank 1|code 3|I cannot go on"),
        ("os._exit in als.run", lambda gang: gang.session.run(leave), "rank 1|code 3|I cannot go"),
    ],
)
def test_a_rank_that_ends_itself_costs_the_call(
    gang: Gang, fault: str, call: Callable[[Gang], Any], words: str
) -> None:
    start = traces.clock()
    outcome = inject_and_retry(lambda: None, lambda: call(gang))
    assert traces.clock() - start < ERROR_LIMIT_S
    gang.renewed(fault, outcome, *words.split("|"))


@pytest.mark.cell("rank", "in a call", "private", "call fails")
@pytest.mark.parametrize(
    ("fault", "call", "rank", "words"),
    [
        (
            "exception on one rank, others wait for it",
            lambda gang: gang.session.load_library("echo").fail(rank=1),
            1,
            "on purpose|ValueError|in fail",
        ),
        (
            "exception on all ranks",
            lambda gang: gang.session.load_library("echo").fail(),
            0,
            "and on 2 more ranks",
        ),
        ("sys.exit on one rank", lambda gang: gang.lib.quit(2), 2, "SystemExit: I have had enough"),
    ],
)
def test_an_exception_fails_the_call_alone(
    gang: Gang, fault: str, call: Callable[[Gang], Any], rank: int, words: str
) -> None:
    start = traces.clock()
    with pytest.raises(RoutineError) as caught:
        call(gang)
    seconds = traces.clock() - start
    assert seconds < ERROR_LIMIT_S
    assert caught.value.rank == rank
    for word in words.split("|"):
        assert word in f"{caught.value}{caught.value.traceback}"
    assert gang.works()
    record(fault, seconds, None, caught.value)


def test_ranks_that_return_late_from_a_failed_call_keep_their_gang(gang: Gang) -> None:
    start = time.monotonic()
    with traces.within(1.0), pytest.raises(RoutineError, match="before the others") as caught:
        gang.lib.late(0, 1.5)
    assert "have not come back from the call yet" in str(caught.value)
    assert caught.value.rank == 0
    assert gang.works()
    assert time.monotonic() - start > 1.4


def test_ranks_that_wait_in_native_mpi_leave_with_a_failed_call(gang: Gang) -> None:
    start = traces.clock()
    with pytest.raises(RoutineError, match="before the barrier") as caught:
        gang.lib.stuck(1)
    seconds = traces.clock() - start
    assert seconds < ERROR_LIMIT_S
    assert caught.value.rank == 1
    assert gang.works(renewed=True)
    record("exception on one rank, others wait in native MPI", seconds, None, caught.value)


@pytest.mark.cell("rank", "in a call", "private", "renewed")
def test_a_stopped_rank_delays_its_own_gang_only(gang: Gang, bystander: Gang) -> None:
    kill(gang.ranks[1], signal.SIGSTOP)
    assert bystander.works()
    outcome = inject_during(lambda: kill(gang.ranks[1]), gang.lib.total)
    gang.renewed("kill -9 of a stopped rank", outcome, "rank 1", "SIGKILL")


def test_a_closed_session_leaves_nothing(bystander: Gang, new_gang: NewGang) -> None:
    gang = new_gang(3)
    start = traces.clock()
    gang.session.close()
    seconds = traces.clock() - start
    gone_s = assert_clean(gang.before)
    assert seconds < ERROR_LIMIT_S
    record("(no fault: session closed)", seconds, gone_s, "-")


# --- processes that ranks start, ports that MPI opens ---


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


@pytest.mark.cell("rank", "in a call", "private, mpiexec", "renewed")
@pytest.mark.cell("rank", "idle", "private", "renewed")
@pytest.mark.parametrize(("launcher", "idle"), [("pmi", False), ("pmi", True), ("mpiexec", False)])
def test_a_killed_rank_is_noticed_though_its_child_holds_its_sockets(
    bystander: Gang, new_gang: NewGang, launcher: str, idle: bool
) -> None:
    gang = new_gang(2, launcher=launcher)
    child = gang.session.run(start_child, 1)
    assert traces.alive(child)
    words = ["rank 1"]
    if launcher == "pmi":
        words += ["SIGKILL", str(gang.ranks[1])]
    cause = lambda: kill(gang.ranks[1])  # noqa: E731
    fault = f"kill -9 of a rank whose child holds its sockets, {launcher}"
    if idle:
        cause()
        gang.goes_on(fault, until_replaced(gang.session, {gang.ranks[1]}, ERROR_LIMIT_S))
    else:
        outcome = inject_during(cause, lambda: gang.lib.collective(missing=1))
        gang.renewed(fault, outcome, *words)
    assert not traces.alive(child)
    gang.close()


def test_descendants_of_ranks_end_with_the_gang(bystander: Gang, new_gang: NewGang) -> None:
    gang = new_gang(2)
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


@pytest.mark.cell("rank", "in a call", "mpiexec", "renewed")
def test_mpi_abort_in_a_gang_of_mpiexec_names_its_rank(bystander: Gang, new_gang: NewGang) -> None:
    gang = new_gang(3, launcher="mpiexec")
    outcome = inject_and_retry(lambda: None, lambda: gang.lib.abort(1, 7))
    gang.renewed("MPI_Abort in a gang of mpiexec", outcome, "rank 1", "MPI_Abort(7)")
    gang.close()


@pytest.mark.parametrize("launcher", ["pmi", "mpiexec"])
def test_a_gang_on_one_node_opens_no_port_of_mpi(
    bystander: Gang, new_gang: NewGang, launcher: str
) -> None:
    gang = new_gang(2, launcher=launcher)
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
    source = """
        @routine("version")
        def version(ctx: Context) -> int:
            return ctx.comm.allreduce({number})
    """
    old = gang.session.load_library("version", library(path, source.format(number=1)))
    assert old.version() == 3
    with library(path, source.format(number=100)).open("a") as file:
        file.write("import os\n")
        file.write("if os.environ['PMI_RANK'] == '1': raise OSError('rank 1 cannot read')\n")
    start = traces.clock()
    with pytest.raises(AlchemistError, match="rank 1 cannot read") as caught:
        gang.session.load_library("version", path)
    record("a library that loads on some ranks", traces.clock() - start, None, caught.value)
    assert caught.value.facts["rank"] == 1
    assert old.version() == 3  # on every rank
    assert old.version() == 3
    library(path, source.format(number=2))
    assert gang.session.load_library("version", path).version() == 6
