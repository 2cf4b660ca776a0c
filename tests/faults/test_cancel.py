"""A call is cancelled: Ctrl-C in the user's program, with the Ray task, or while it waits."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import TaskCancelledError

from alchemist_ray import AlchemistSession
from alchemist_ray.attached.control_channel import SocketChannel
from alchemist_ray.errors import (
    CallTimeoutError,
    CancelledError,
    RoutineError,
)
from alchemist_ray.observe.status import table
from tests.faults.conftest import (
    ERROR_LIMIT_S,
    Call,
    Gang,
    NewGang,
    inject_during,
    kill,
    record,
    refused,
)
from tests.faults.named.named_gangs import Program
from tests.mpi_workers import waits
from tests.support import traces
from tests.support.build import needs_compiler, shared_object
from tests.support.traces import within

LIBRARY_NBYTES = 512 << 20  # which the GroupManager reads for 0.3 s; most are a hole in the file
WAYS = ["mpi", "loop", "sleep", "output", "routine"]
PROGRAM = f"""
    from tests.support.traces import clock

    def hang(comm, how):
        print("in it", flush=True)
        if how == "mpi":
            comm.recv(source=0)
        while how == "loop":
            pass
        if how == "output":
            while True:
                print("line", flush=True)
        time.sleep(60)

    with AlchemistSession(2) as als:
        pids = [w.pid for w in als.list_workers()]
        echo = als.load_library("echo")
        for how in {WAYS}:
            print("ready", how, flush=True)
            try:
                echo.sleep(60.0) if how == "routine" else als.run(hang, how)
            except KeyboardInterrupt:
                told = clock()
            assert als.run(lambda comm: comm.allreduce(comm.rank)) == 1
            assert echo.who() == [0, 1]
            print("again", how, round(clock() - told, 3), flush=True)
        assert [w.pid for w in als.list_workers()] == pids
"""


def test_ctrl_c_cancels_the_call_and_the_gang_goes_on(bystander: Gang) -> None:
    ways, worst = list(WAYS), 0.0
    with Program(PROGRAM) as program:
        for line in itertools.chain([program.said], program.process.stdout):
            # Ctrl-C may cut a line of the ranks' output; the program's output then continues it.
            if "ready " in line:
                threading.Timer(0.7, program.process.send_signal, (signal.SIGINT,)).start()
            elif found := re.search(r"again (\w+) ([\d.]+)$", line):
                assert found[1] == ways.pop(0)
                worst = max(worst, float(found[2]))
        assert program.process.wait(30) == 0
    assert ways == []
    assert worst < ERROR_LIMIT_S
    record("Ctrl-C while a call is waited for (until the next is done)", worst, None, "-")


def hang(comm: Any) -> None:
    comm.recv(source=0)


def test_a_cancelled_ray_task_cancels_its_call(gang: Gang) -> None:
    ref = gang.lib.collective.remote(missing=2)
    time.sleep(0.3)
    with within(ERROR_LIMIT_S):
        ray.cancel(ref)
        with pytest.raises(TaskCancelledError):
            ray.get(ref, timeout=10)
        assert gang.works()


def test_a_cancelled_ray_task_that_waits_for_a_call_cancels_it(gang: Gang) -> None:
    @ray.remote(num_cpus=0)
    def calls(lib: Any) -> None:
        lib.collective(missing=2)

    ref = calls.remote(gang.lib)
    while not gang.session.list_calls():
        time.sleep(0.05)
    with within(ERROR_LIMIT_S):
        ray.cancel(ref)
        with pytest.raises(TaskCancelledError):
            ray.get(ref, timeout=10)
        assert gang.works()


def test_a_process_is_told_that_it_waits_for_the_call_of_another(
    gang: Gang, capfd: pytest.CaptureFixture[str]
) -> None:
    @ray.remote(num_cpus=0)
    def calls(lib: Any) -> None:
        lib.late(-1, 3.0)

    ref = calls.remote(gang.lib)
    while not gang.session.list_calls():
        time.sleep(0.05)
    assert gang.works()
    ray.get(ref, timeout=10)
    told = capfd.readouterr().err
    assert re.search(r"waiting for breaking.late of .*pid \d+\), sent 1 s ago\n", told)


def test_a_call_that_waits_for_another_can_be_cancelled(gang: Gang) -> None:
    first = gang.lib.late.remote(-1, 1.0)
    time.sleep(0.1)
    with within(0.9), pytest.raises(CallTimeoutError):
        gang.session.run(hang, timeout_s=0.2)
    ray.get(first)


class Stop(Exception):
    """Raised by a signal's handler."""


def test_a_handler_of_another_signal_cancels_the_call_as_well(gang: Gang) -> None:
    def stop(number: int, frame: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Stop):
            gang.session.run(hang)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert gang.session.run(lambda comm: comm.size, timeout_s=10) == 3


def test_a_second_ctrl_c_does_not_leave_ranks_in_the_call(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SocketChannel.tell

    def tell(channel: SocketChannel, body: Any) -> None:
        if body["op"] == "cancel":
            os.kill(os.getpid(), signal.SIGINT)
        real(channel, body)

    monkeypatch.setattr(SocketChannel, "tell", tell)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        gang.session.run(hang)
    assert gang.session.run(lambda comm: comm.size, timeout_s=30) == 3


def test_a_time_limit_interrupts_all_ranks_at_once(gang: Gang) -> None:
    fault = "timeout_s=0.3 of a call, ranks wait in MPI"
    place = r"ranks 0, 1, 2 were in \S*recv at hang \(test_cancel.py:\d+\)"
    with refused(fault, CancelledError, place, 0.3, 0.3 + ERROR_LIMIT_S):
        gang.session.run(hang, timeout_s=0.3)
    for _ in range(10):
        with pytest.raises(CancelledError):
            gang.session.run(hang, timeout_s=0.01)
    assert gang.works()


def waiting_library(folder: Path) -> Path:
    """A library in C whose routines wait in MPI."""
    source = Path(waits.__file__).with_name("waiting.c")
    return shared_object(source, folder / "libwaiting.so")


@needs_compiler
def test_waits_of_native_code_end_with_an_error_a_time_limit_and_ctrl_c(
    gang: Gang, tmp_path: Path
) -> None:
    path = waiting_library(tmp_path)
    lib = gang.session.load_library("waiting", path)
    A = gang.session.send_matrix(np.arange(6.0))
    hang = lib.hang.options(timeout_s=0.3)
    # Where they were is told if they have answered before their processes end.
    where = r"cancelled(\. At that time ranks 0, 1, 2 were in MPI_Recv in waiting.hang)?$"
    for turn in range(3):
        with refused("an error while others wait in C", RoutineError, "rank 1", 0, ERROR_LIMIT_S):
            lib.wait(("Allreduce", "Waitall", "Probe")[turn], careless=turn == 1)
        with refused("timeout_s in C", CancelledError, where, 0.3, 0.3 + ERROR_LIMIT_S):
            hang()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with within(0.3 + ERROR_LIMIT_S), pytest.raises(KeyboardInterrupt):
            lib.hang()
    assert A.fetch().tolist() == list(range(6))
    assert gang.works(renewed=True)


@needs_compiler
def test_a_call_is_cancelled_while_its_library_is_looked_at_for_other_ranks(
    gang: Gang, tmp_path: Path
) -> None:
    path = waiting_library(tmp_path)
    os.truncate(path, LIBRARY_NBYTES)
    lib = gang.session.load_library("looked_at", path)
    with pytest.raises(CancelledError):
        lib.hang.options(timeout_s=0.3)()
    assert gang.session.run(lambda comm: comm.size, timeout_s=60) == 3  # there are other ranks
    with refused("timeout_s while a library is loaded again", CancelledError, "cancelled", 0.1):
        lib.hang.options(timeout_s=0.1)()
    assert gang.works(renewed=True)


@pytest.mark.cell("rank", "in a call", "private", "renewed")
def test_a_rank_killed_in_a_function_costs_the_call(gang: Gang) -> None:
    outcome = inject_during(lambda: kill(gang.ranks[2]), lambda: gang.session.run(hang))
    gang.renewed("kill -9 of a rank in als.run", outcome, "rank 2", "SIGKILL")


def test_ranks_that_are_stuck_in_native_code_are_replaced(
    bystander: Gang, new_gang: NewGang, capsys: pytest.CaptureFixture[str]
) -> None:
    def stuck(comm: Any) -> None:
        import ctypes  # noqa: PLC0415

        lock = ctypes.create_string_buffer(64)  # a mutex
        for _ in range(2 if comm.rank == 0 else 0):
            ctypes.CDLL(None).pthread_mutex_lock(lock)

    gang = new_gang(2)
    limit = r"2 s \(stuck_timeout_s\)"
    where = rf"rank 0 is still in \S*stuck; the ranks are started again if that lasts {limit}"
    with within(ERROR_LIMIT_S), pytest.raises(CallTimeoutError, match=where):
        gang.session.run(stuck, timeout_s=0.2, stuck_timeout_s=2)
    begin, waiting = traces.clock(), Call(gang.lib.total)
    name = gang.session.connection.address.gang
    (shown,) = (one for one in AlchemistSession.list() if one.name == name)
    # Not our clean-up:
    (call,) = (call for call in shown.calls if not call.name.endswith("total"))
    assert call.name.rpartition(".")[2] == "stuck"
    assert call.state == "cancelled, but ranks are still in it"
    assert f" ({call.state})" in table([shown])
    outcome = waiting.outcome(begin + 2)
    assert outcome.error is None, outcome.error
    assert outcome.result == 1
    assert re.search(rf"waiting for ranks .*\(up to {limit}", capsys.readouterr().err)
    gang.goes_on("  cancelled, stuck in native code: stuck_timeout_s later", outcome.seconds)
    (shown,) = (one for one in AlchemistSession.list() if one.name == name)
    assert shown.renewals == 1
    assert "cancelled and rank 0 did not return within 2 s" in shown.last_loss
    assert f"{name}: its ranks were started again 1 time; the last time a call" in table([shown])
    gang.close()
