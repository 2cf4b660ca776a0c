"""A call leaves the processes of the ranks as they were, and their children are no ranks."""

from __future__ import annotations

import builtins
import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ali
from alchemist_ray import AlchemistSession, Executor
from alchemist_ray.errors import (
    CallTimeoutError,
    FileError,
    ResourceError,
    RoutineError,
    SessionError,
)

LIMIT_S = 20.0


def pids(comm: Any) -> list[int]:
    found: list[int] = comm.allgather(os.getpid())
    return found


# --- children ---


def forks(comm: Any, end: str) -> list[int]:
    """The exit code of each rank's child, which ends in this way."""
    pid = os.fork()
    if pid == 0:
        mine = ali.context().zeros((64, 64), "float64")  # in the child's memory
        mine.local[...] = 7
        if end == "exit":
            sys.exit(3)
        if end == "text":
            sys.exit("the child is done")
        if end == "error":
            raise ValueError("of the child")
        return [0]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found: list[int] = comm.allgather(code)
    return found


@pytest.mark.parametrize(("end", "code"), [("exit", 3), ("text", 1), ("error", 1), ("return", 0)])
def test_a_forked_child_ends_by_itself_and_its_parent_goes_on(
    als: AlchemistSession, capsys: pytest.CaptureFixture[str], end: str, code: int
) -> None:
    before, matrix = als.run(pids), np.arange(64.0 * 64).reshape(64, 64)
    A = als.send_matrix(matrix)
    assert als.run(forks, end, timeout_s=LIMIT_S) == [code] * 3
    for _ in range(3):
        assert als.run(pids, timeout_s=LIMIT_S) == before
    np.testing.assert_array_equal(A.fetch(), matrix)
    told = capsys.readouterr().err
    assert ("ValueError: of the child" in told) == (end == "error")
    assert "foreign_code" not in told
    assert ("the child is done" in told) == (end == "text")


def test_a_child_that_a_library_forks_as_it_loads_ends_too(
    als: AlchemistSession, tmp_path: Path
) -> None:
    before = als.run(pids)
    text = 'import os, sys, ali\n@ali.routine("n")\ndef f(ctx) -> int: return ctx.size\n'
    text += "if (pid := os.fork()) == 0: sys.exit(0)\nos.waitpid(pid, 0)\n"
    path = tmp_path / "forking.py"
    path.write_text(text)
    assert als.load_library("forking", path).f() == 3
    assert als.run(pids, timeout_s=LIMIT_S) == before


def test_children_of_ranks_use_mpi_for_themselves(als: AlchemistSession) -> None:
    def sizes(comm: Any) -> tuple[Any, ...]:
        program = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
        command = [sys.executable, "-c", program]
        alone = subprocess.check_output(command, text=True, timeout=LIMIT_S).strip()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.map(abs, [-1, 2])
        resource_tracker._resource_tracker._stop()  # a process of multiprocessing, which stays
        return alone, found

    assert als.run(sizes, timeout_s=60) == ("1", [1, 2])


def test_processes_cannot_be_spawned_and_the_error_names_the_alternative(
    als: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def spawns(comm: Any) -> None:
        from mpi4py import MPI  # noqa: PLC0415

        MPI.COMM_SELF.Spawn(sys.executable, ["-c", "pass"])

    def pooled(comm: Any) -> None:
        from mpi4py.futures import MPIPoolExecutor  # noqa: PLC0415

        with MPIPoolExecutor(2) as pool:
            list(pool.map(abs, [-1]))

    def shared(comm: Any) -> Any:
        from mpi4py.futures import MPICommExecutor  # noqa: PLC0415

        with MPICommExecutor(comm) as pool:
            return list(pool.map(abs, [-1, -2])) if pool is not None else None

    with pytest.raises(RoutineError):
        als.run(spawns, timeout_s=LIMIT_S)
    assert "MPI_Comm_spawn is refused" in capsys.readouterr().err
    with pytest.raises(RoutineError, match="MPICommExecutor"):
        als.run(pooled, timeout_s=LIMIT_S)
    assert als.run(shared, timeout_s=LIMIT_S) == [1, 2]


# --- settings ---


def settings(comm: Any) -> list[Any]:
    """The settings of each rank, which prints to both streams."""
    umask = os.umask(0)
    os.umask(umask)
    sys.stdout.write("out\n")
    sys.stderr.write("err\n")
    handlers = [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGCHLD, signal.SIGALRM)]
    found: list[Any] = comm.allgather(
        (
            umask, os.getcwd(), np.geterr(), np.get_printoptions()["precision"], handlers,
            sorted(map(repr, warnings.filters)), sys.getrecursionlimit(),
            sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            signal.getitimer(signal.ITIMER_REAL), sys.gettrace(), sys.getprofile(), gc.isenabled(),
            [(s.encoding, s.errors, s.line_buffering) for s in (sys.stdout, sys.stderr)],
            [repr(hook) for hook in (sys.excepthook, sys.displayhook, threading.excepthook)],
            sorted((name, repr(its)) for name, its in vars(builtins).items() if callable(its)),
        )
    )  # fmt: skip
    return found


def changes(comm: Any) -> None:
    os.umask(0o777)
    os.chdir("/")
    np.seterr(all="raise")
    np.set_printoptions(precision=1)
    warnings.simplefilter("error")
    sys.setrecursionlimit(3000)
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
    signal.setitimer(signal.ITIMER_REAL, 60)  # seen by `settings`; it must not fire within the call


def silenced(comm: Any) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = io.StringIO()


def none(comm: Any) -> None:
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]


def closed(comm: Any) -> None:
    sys.stdout.close()
    sys.stderr.close()


def wrapped(comm: Any) -> None:
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer)
    sys.stderr = io.TextIOWrapper(sys.stderr.detach())


def reconfigured(comm: Any) -> None:
    """As the program that it is under mpiexec, whose streams are pipes."""
    for stream in (sys.stdout, sys.stderr):
        assert not stream.seekable()
        stream.reconfigure(encoding="latin-1", errors="replace", line_buffering=False)
        stream.write("caf\u00e9 is printed\n")


def hooked(comm: Any) -> None:
    sys.excepthook = sys.displayhook = sys.unraisablehook = threading.excepthook = print
    sys.setprofile(lambda *_: None)
    gc.disable()
    builtins.print = builtins.open = None  # type: ignore[assignment]
    del builtins.sorted


def redirected(comm: Any) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def fails(comm: Any) -> None:
    changes(comm)
    none(comm)
    raise ValueError


ROUTINE = """
import ali
from tests.alchemist_ray.functions import test_run_process as changing

@ali.routine()
def change(ctx: ali.Context, name: str):
    getattr(changing, name)(ctx.comm)
"""
CHANGES = ["changes", "silenced", "none", "closed", "wrapped", "reconfigured", "hooked",
           "redirected", "fails"]  # fmt: skip


@pytest.mark.parametrize("by", ["function", "script", "routine"])
@pytest.mark.parametrize("name", CHANGES)
def test_settings_end_with_their_call(
    als: AlchemistSession, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, by: str
) -> None:
    before = als.run(settings)
    capsys.readouterr()
    path = tmp_path / "changing.py"
    try:
        if by == "function":
            als.run(globals()[name])
        elif by == "script":
            module = "tests.alchemist_ray.functions.test_run_process"
            path.write_text(f"from mpi4py import MPI\nfrom {module} import {name}\n{name}(None)\n")
            als.run_script(path)
        else:
            path.write_text(ROUTINE)
            als.load_library("changing", path).change(name)
    except RoutineError:
        assert name == "fails"
    capsys.readouterr()
    assert als.run(settings) == before
    told = capsys.readouterr()
    for rank in range(3):
        assert f"[rank {rank}] out\n" in told.out
        assert f"[rank {rank}] err\n" in told.err
    if name == "changes":
        with pytest.raises(CallTimeoutError):  # by the signal that was ignored
            als.run(lambda comm: time.sleep(60), timeout_s=0.2)


def test_no_rank_starts_a_ray_of_its_own(als: AlchemistSession) -> None:
    def inside(comm: Any) -> list[str]:
        told = []
        for make in (lambda: AlchemistSession(1), lambda: Executor().submit(len).result()):
            try:
                make()
            except SessionError as error:
                told.append(str(error))
        return told

    for told in als.run(inside, timeout_s=LIMIT_S), als.run(inside, timeout_s=LIMIT_S):
        assert len(told) == 2
        assert all("in the program that calls the ranks" in words for words in told)


# --- errors ---


class NoText(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class Proxy(Exception):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("closed")


class Closed:
    def __repr__(self) -> str:
        raise RuntimeError("closed")


ERRORS: dict[str, Any] = {
    "NoText": lambda: NoText(), "Proxy": lambda: Proxy("x"), "KeyError": lambda: KeyError(Closed()),
    "ValueError": lambda: ValueError(Closed()), "MemoryError": lambda: MemoryError(Closed()),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_that_cannot_be_shown_fails_its_call_alone(
    als: AlchemistSession, name: str
) -> None:
    def raises(comm: Any) -> None:
        if comm.rank == 1:
            raise ERRORS[name]()
        comm.Barrier()

    before, A = als.run(pids), als.send_matrix(np.eye(3))
    expected = "rank 1 ran out of mem" if name == "MemoryError" else f"failed on rank 1: {name}: "
    with pytest.raises((RoutineError, ResourceError), match=expected) as caught:
        als.run(raises)
    if name != "MemoryError":
        assert "in raises" in str(caught.value)
    assert als.run(pids) == before
    np.testing.assert_array_equal(A.fetch(), np.eye(3))


def test_texts_that_are_no_utf8_arrive(als: AlchemistSession, tmp_path: Path) -> None:
    def raises(comm: Any, name: str) -> None:
        raise ValueError(f"no data in {name}")

    name = os.fsdecode(b"caf\xe9.npy")
    with pytest.raises(RoutineError, match=f"ValueError: no data in {name}"):
        als.run(raises, name)
    with pytest.raises(FileError, match=name):
        als.load_matrix(tmp_path / name)
    np.save(tmp_path / name, np.eye(2))
    np.testing.assert_array_equal(als.load_matrix(tmp_path / name).fetch(), np.eye(2))


def test_a_function_at_exit_that_raises_fails_nothing(
    als: AlchemistSession, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "ends.py").write_text("""
import atexit, sys
atexit.register(print, "the first one is called last")
atexit.register(lambda: 1 / 0)
atexit.register(sys.exit, 3)
""")
    als.run_script(tmp_path / "ends.py")
    told = capsys.readouterr()
    assert told.out.count("the first one is called last") == 3
    assert told.err.count("Exception ignored in atexit callback: <function <lambda>") == 3
    assert told.err.count("ZeroDivisionError") == 3


def test_the_gangs_communicator_cannot_be_freed(als: AlchemistSession) -> None:
    def frees(comm: Any) -> None:
        comm.Dup().Free()
        comm.Split(comm.rank % 2).Free()
        comm.Free()

    with pytest.raises(RoutineError, match="gang's own communicator"):
        als.run(frees)
    with pytest.raises(RoutineError, match="gang's own communicator"):
        als.run(lambda comm: comm.Disconnect())
    assert als.run(lambda comm: comm.allreduce(1)) == 3
