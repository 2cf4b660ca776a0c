"""A rank fails while the others wait for it in MPI, in code of any language."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import CallTimeoutError, MatrixError, RoutineError
from tests.faults.conftest import ERROR_LIMIT_S, Call, Gang, inject_and_retry
from tests.mpi_workers import waits
from tests.mpi_workers.waits.test_mpi_layer import BLACS
from tests.support import commands, traces
from tests.support.build import needs_compiler, shared_object
from tests.support.suite import part
from tests.support.traces import within

pytestmark = needs_compiler

CALLS = (
    *("Allreduce", "Bcast", "Recv", "Wait", "Waitall", "Barrier", "Probe", "Win_fence"),
    *("Alltoallv", "Allreduce_c"),
)
LANGUAGES = ("mpi4py", "C", "Fortran")  # of each fault all calls, of each call all languages
LIMIT_S = 2.5  # of a call, until which its ranks wait also on a busy machine
SOFT, HARD = ("error", "Ctrl-C", "limit"), ("exit", "SIGSEGV")
CASES = [
    *(
        (fault, call, LANGUAGES[(i + j) % 3])
        for i, fault in enumerate(SOFT + HARD)
        for j, call in enumerate(CALLS)
    ),
    *((fault, *case) for fault in SOFT + HARD for case in (("dgsum2d", "C"), ("norm", "petsc4py"))),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that waits, with Fortran and BLACS where they are installed."""
    folder = tmp_path_factory.mktemp("waiting")
    source = Path(waits.__file__).with_name("waiting.c")
    flags: list[str] = []
    if blacs := ctypes.util.find_library(BLACS):
        flags += ["-DWITH_BLACS", f"-l:{blacs}"]
    if shutil.which("gfortran"):
        compiled = str(folder / "waiting.o")
        fortran = str(source.with_suffix(".f90"))
        commands.output("gfortran", "-fPIC", "-J", folder, "-c", fortran, "-o", compiled)
        flags += ["-DWITH_FORTRAN", compiled, "-lgfortran"]
    return shared_object(source, folder / "libwaiting.so", *flags)


def in_python(how: str, fault: str) -> Callable[[Any], None]:
    """A function that waits in mpi4py or PETSc for rank 1."""

    def wait(comm: Any) -> None:
        from mpi4py import MPI  # noqa: PLC0415

        x, y = np.zeros(64), np.zeros(64)
        each = [1] * comm.size
        if how == "norm":
            from petsc4py import PETSc  # noqa: PLC0415

            vector = PETSc.Vec().createMPI(30, comm=comm)
            vector.setRandom()  # the norm of zeros is known
        if comm.rank == 1:
            if fault == "exit":
                os._exit(3)
            if fault == "SIGSEGV":
                os.kill(os.getpid(), signal.SIGSEGV)
            if fault == "error":
                raise ValueError("rank 1 does not take part")
            while True:
                time.sleep(0.001)
        requests = [comm.Irecv(x[i : i + 1], 1, i) for i in range(2) if how.startswith("Wait")]
        match how:
            case "norm":
                vector.norm()
            case "Allreduce" | "Allreduce_c":
                comm.Allreduce(x[:3], y[:3])
            case "Bcast":
                comm.Bcast(x[:3], 1)
            case "Recv":
                comm.Recv(x[:3], 1)
            case "Wait":
                requests[0].Wait()
            case "Waitall":
                MPI.Request.Waitall(requests)
            case "Barrier":
                comm.Barrier()
            case "Probe":
                comm.Probe(1)
            case "Win_fence":
                MPI.Win.Create(x, 8, comm=comm).Fence()
            case "Alltoallv":
                comm.Alltoallv([x, each], [y, each])

    return wait


@contextlib.contextmanager
def ended(fault: str) -> Iterator[None]:
    """The call of the block ends with the right error, in time."""
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    if fault == "Ctrl-C":
        timer.start()
    expected, words = {
        "error": (RoutineError, "rank 1 does not take part"),
        "Ctrl-C": (KeyboardInterrupt, None),
        "limit": (CallTimeoutError, "ranks? .*(0|2)"),
    }[fault]
    try:
        with within(LIMIT_S + ERROR_LIMIT_S), pytest.raises(expected, match=words):
            yield
    finally:
        timer.cancel()


def missing(how: str, language: str) -> bool:
    """Whether a case needs what is not installed here."""
    if language == "petsc4py":
        return importlib.util.find_spec(language) is None
    if how == "dgsum2d":
        return ctypes.util.find_library(BLACS) is None
    return language == "Fortran" and shutil.which("gfortran") is None


def wait(gang: Gang, fault: str, how: str, language: str) -> None:
    """A call in which rank 1 has the fault while the others wait for it."""
    limit_s = LIMIT_S if fault == "limit" else None
    if language in ("C", "Fortran"):
        lib = gang.session.library("waiting")
        lib.wait.options(timeout_s=limit_s)(how, fault=fault, fortran=language == "Fortran")
    else:
        gang.session.run(in_python(how, fault), timeout_s=limit_s)


@pytest.mark.parametrize("fault", [*SOFT, *HARD])
def test_a_wait_in_any_code_ends_with_its_call(gang: Gang, built: Path, fault: str) -> None:
    gang.session.load_library("waiting", built)
    cases = [case for case in CASES if case[0] == fault]
    for case in cases if fault in SOFT else part(cases, HARD.index(fault), 3):  # the ranks are gone
        if missing(*case[1:]):
            continue
        if fault in SOFT:
            with ended(fault):
                wait(gang, *case)
            # Native code may not have looked at the error of its wait: then others take its place,
            gang.lib.total()  # before the next call
            gang.ranks = [worker.pid for worker in gang.session.list_workers()]
            assert gang.works(), case
        else:
            outcome = inject_and_retry(lambda: None, partial(wait, gang, *case))
            # PETSc catches the signal, says its name and calls MPI_Abort.
            cause = "exited with code 3" if fault == "exit" else "SEGV"
            what = f"  {fault}, others wait in {case[1]}, {case[2]}"
            gang.renewed(what, outcome, "rank 1", cause)


def waits_of(session: AlchemistSession) -> list[dict[str, list[int]]]:
    """Where the ranks of each call wait in MPI."""
    return [call.waits_in for call in session.list_calls()]


def shows(session: AlchemistSession, function: str, ranks: list[int]) -> bool:
    """Whether the call under way shows soon that these ranks wait in this function."""
    wanted = [{function: ranks}]
    return traces.wait_until(lambda: waits_of(session) == wanted, 10) is not None


@pytest.mark.parametrize(
    ("function", "language"),
    [("Recv", "C"), ("Allreduce", "mpi4py"), ("Barrier", "Fortran"), ("Alltoallv", "C")],
)
def test_calls_and_profiles_show_in_which_mpi_call_ranks_wait(
    gang: Gang, built: Path, function: str, language: str
) -> None:
    if missing(function, language):
        pytest.skip(f"{language} is not installed")
    gang.session.load_library("waiting", built)
    with gang.session.profile() as profile:
        call = Call(partial(wait, gang, "none", function, language))
        assert shows(gang.session, f"MPI_{function}", [0, 2]), waits_of(gang.session)
        time.sleep(0.3)
        gang.session.cancel()
        call.outcome(0.0)
    assert gang.session.list_calls() == []
    if language != "mpi4py":
        return  # the ranks were started again, and have no history of the call
    in_mpi = {one.rank: sum(entry.mpi_s for entry in one.entries) for one in profile.ranks}
    assert min(in_mpi[0], in_mpi[2]) > 0.25, in_mpi
    assert in_mpi[1] < 0.2, in_mpi


def test_plain_waits_of_mpi_cost_the_ranks_and_are_shown(bystander: Gang, built: Path) -> None:
    with AlchemistSession(2, mpi_waits="plain", stuck_timeout_s=1) as plain:
        plain.load_library("waiting", built)
        with pytest.raises(RoutineError, match="other ranks have not come back"):
            plain.library("waiting").wait("Recv")
        assert [call.state[:6] for call in plain.list_calls()] == ["failed"]
        assert shows(plain, "MPI_Recv", [0])
        assert plain.run(lambda comm: comm.allreduce(1)) == 2
        (shown,) = (g for g in plain.list() if g.name == plain.connection.address.gang)
        assert "rank 0 did not return within 1 s" in shown.last_loss


def test_a_matrix_that_an_interrupted_routine_was_writing_is_undefined(
    gang: Gang, built: Path
) -> None:
    lib = gang.session.load_library("waiting", built)
    A = gang.session.send_matrix(np.zeros((30, 4)))
    lib.write(A, wait=False)  # loaded: the next call is on the ranks when its time is over
    with pytest.raises(CallTimeoutError):
        lib.write.options(timeout_s=0.5)(A)
    words = r"matrix \w+ is undefined: waiting.write was interrupted while it changed it in place"
    uses: list[Callable[[], Any]] = [
        A.fetch,
        lambda: gang.lib.twice(A),
        lambda: A.to_layout("VC_STAR" if A.layout != "VC_STAR" else "STAR_VC"),
        lambda: gang.session.run(lambda comm, A: A.shape, A),
    ]
    for use in uses:
        with pytest.raises(MatrixError, match=words):
            use()
    assert gang.works(renewed=True)
    lib.write(A, wait=False)
    assert (A.fetch() == 7).all()
