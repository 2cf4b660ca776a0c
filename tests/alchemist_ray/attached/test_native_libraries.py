"""Shared objects behind a session, from the view of a C library's user."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    AlchemistError,
    BadArgumentError,
    CallTimeoutError,
    GroupRecoveredError,
    LibraryLoadError,
    LibraryNotFoundError,
    NoSuchRoutineError,
    RoutineError,
)
from tests.support.build import needs_compiler, shared_object

pytestmark = needs_compiler
NATIVE = Path(__file__).parents[2] / "ali" / "native"


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_object(NATIVE / "every.c", tmp_path_factory.mktemp("native") / "libevery.so")


@pytest.mark.parametrize("session", [3], indirect=True)
def test_a_c_library_is_like_any_other(session: AlchemistSession, every: Path) -> None:
    lib = session.load_library("every", every)
    assert "coordinates" in dir(lib)
    assert list(inspect.signature(lib.echo).parameters)[:3] == ["A", "i", "x"]
    assert inspect.signature(lib.echo).parameters["text"].default == "hello"
    assert "Everything back." in lib.echo.__doc__
    a = np.arange(20.0).reshape(4, 5)
    A = session.send_matrix(a, layout="MC_MR")
    twin, *rest = lib.echo(A, text="Grüße", ints=[7])
    np.testing.assert_array_equal(twin.fetch(), a)
    assert rest == [3, 0.5, 1.5, True, "Grüße", [7], [], [True, False], ["a", "b"]]
    made = lib.coordinates(6, 5, 1)
    assert (made.shape, made.layout, made.dtype) == ((6, 5), "MC_MR", np.int64)
    np.testing.assert_array_equal(made.fetch(), np.add.outer(1000 * np.arange(6), np.arange(5)))
    assert [lib.count() for _ in range(3)] == [1, 2, 3]
    assert session.load_library("every", every).count() == 4
    assert session.load_library("every", every, reload=True).count() == 1


@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_a_c_routine_that_fails_fails_its_call_alone(
    session: AlchemistSession, every: Path, rank: int
) -> None:
    lib = session.load_library("every", every)
    for _ in range(3):
        with pytest.raises(
            RoutineError, match=r"every\.fail failed on rank \d: no luck: today"
        ) as caught:
            lib.fail(rank, "today")
        assert caught.value.rank == max(rank, 0)
        assert lib.count() > 0
    with pytest.raises(BadArgumentError, match="no such luck"):
        lib.fail(how="refuse")
    with pytest.raises(BadArgumentError, match="requires 'rank' to be of type int"):
        lib.fail("one")
    with pytest.raises(NoSuchRoutineError, match=r"it has .*coordinates"):
        lib.nothing()


def test_a_file_that_is_not_a_library_is_refused(session: AlchemistSession, tmp_path: Path) -> None:
    with pytest.raises(LibraryNotFoundError, match="there is no file"):
        session.load_library("x", tmp_path / "libx.so")
    (tmp_path / "libx.so").write_text("text")
    with pytest.raises(LibraryLoadError, match="file too short"):
        session.load_library("x", tmp_path / "libx.so")
    (tmp_path / "x.c").write_text("int nothing;\n")
    shared_object(tmp_path / "x.c", tmp_path / "liby.so")
    with pytest.raises(LibraryLoadError, match="undefined symbol: alchemist_library_describe"):
        session.load_library("y", tmp_path / "liby.so")
    assert session.load_library("echo").who() == [0, 1]


ENDING = """
from mpi4py import MPI
from ali import Context, routine

@routine()
def finalize(ctx: Context) -> None:
    MPI.Finalize()
"""
LEAVING = """
#include <alchemist.h>
static int leave(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in, (void)out;
    if (call->rank == 1) exit(0);
    return ALCHEMIST_OK;
}
static int give_up(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in, (void)out;
    if (call->rank == 1) MPI_Abort(call->comm, 7);
    MPI_Barrier(call->comm);
    return ALCHEMIST_OK;
}
static int finalize(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)call, (void)in, (void)out;
    MPI_Finalize();
    return ALCHEMIST_OK;
}
static const alchemist_routine routines[] = {
    {.name = "leave", .doc = "Ends.", .run = leave},
    {.name = "give_up", .doc = "Aborts.", .run = give_up},
    {.name = "finalize", .doc = "Ends MPI.", .run = finalize},
    {0},
};
ALCHEMIST_LIBRARY("leaving", "Ends its process.", routines)
"""


def test_a_library_that_ends_its_process_is_named(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "leaving.c").write_text(LEAVING)
    built = shared_object(tmp_path / "leaving.c", tmp_path / "libleaving.so")
    (tmp_path / "ending.py").write_text(ENDING)
    exits = "it called exit(), or STOP in Fortran"
    for library, path, routine, cause, why in (
        ("leaving", built, "leave", "exited with code 1", exits),
        *[("leaving", built, "give_up", "rank 1 .*called MPI_Abort.7.", "MPI_Abort")] * 3,
        ("leaving", built, "finalize", "exited with code 1", "has called MPI_Finalize"),
        ("ending", tmp_path / "ending.py", "finalize", "exited with code 1", "called MPI_Finalize"),
    ):
        with AlchemistSession(3) as als:
            lib = als.load_library(library, path)
            with pytest.raises(GroupRecoveredError, match=cause) as caught:
                getattr(lib, routine)()
        assert why in str(caught.value)
        assert (exits in str(caught.value)) == (routine == "leave")


POLLING = """
#include <alchemist.h>
static int poll(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in, (void)out;
    for (;;) {
        double begun = MPI_Wtime();
        while (MPI_Wtime() < begun + 0.01) ;
        int code = alchemist_check(call);
        if (code != ALCHEMIST_OK) return code;
    }
}
static const alchemist_routine routines[] = {{.name = "poll", .doc = "Polls.", .run = poll}, {0}};
ALCHEMIST_LIBRARY("polling", "Polls.", routines)
"""


@pytest.mark.parametrize("session", [2], indirect=True)
def test_a_call_that_is_cancelled_in_native_code_prints_nothing(
    session: AlchemistSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "polling.c").write_text(POLLING)
    lib = session.load_library(
        "polling", shared_object(tmp_path / "polling.c", tmp_path / "libpolling.so")
    )
    for _ in range(3):
        with pytest.raises(CallTimeoutError, match=r"ranks .*(were|still) in polling\.poll"):
            lib.poll.options(timeout_s=1)()
    session.run(lambda comm: print("the end"))
    told = capsys.readouterr()
    assert "the end" in told.out
    assert "ignored" not in told.out + told.err


def test_a_hang_in_native_code_shows_the_ranks_that_are_in_it(cluster: str, tmp_path: Path) -> None:
    built = shared_object(NATIVE / "hanging.c", tmp_path / "libhanging.so")
    with AlchemistSession(4) as als:
        lib = als.load_library("hanging", built)
        with pytest.raises(AlchemistError, match=r"still in hanging\.meet") as caught:
            lib.meet.options(timeout_s=2)()  # all have arrived, also under load
    found = dict(re.findall(r"^(ranks? [\d, ]+) (?:is|are) in (.*)$", str(caught.value), re.M))
    if not found:
        pytest.skip("py-spy may not read other processes here")
    assert "sulk (libhanging.so)" in found.pop("rank 1")
    assert not found  # the others waited in MPI, and have left
