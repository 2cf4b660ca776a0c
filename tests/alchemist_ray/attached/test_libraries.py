"""Libraries on the client: methods with signature and docstring, checked before anything moves."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import (
    AlchemistError,
    BadArgumentError,
    CallTimeoutError,
    LibraryLoadError,
    LibraryNotFoundError,
    NoSuchRoutineError,
    RoutineError,
    SessionError,
    StaleHandleError,
)
from tests.support.build import library

WORKERS = 2


def test_a_routine_has_its_signature_and_docstring(als: AlchemistSession) -> None:
    svd = als.load_library("linalg").truncated_svd
    parameters = inspect.signature(svd).parameters
    assert list(parameters)[:2] == ["A", "rank"]
    assert parameters["A"].annotation is Handle
    assert parameters["rank"].annotation is int
    assert "truncated_svd(A: matrix, rank: int" in svd.__doc__
    assert "singular" in svd.__doc__
    assert "truncated_svd" in dir(als.load_library("linalg"))


def test_every_type_is_returned_unchanged(als: AlchemistSession) -> None:
    echo = als.load_library("echo").echo
    A = als.send_matrix(np.eye(3))
    given = {
        "i": -(2**63),
        "x": float("inf"),
        "z": 1 - 2j,
        "flag": False,
        "text": "Grüße, 世界",
        "ints": [],
        "floats": [1.5, -0.0],
        "flags": [True],
        "texts": ["", "x"],
    }
    twin, *rest = echo(A, **given)
    np.testing.assert_array_equal(twin.fetch(), np.eye(3))
    assert rest == list(given.values())
    assert [type(v) for v in rest[:5]] == [int, float, complex, bool, str]


def test_numpy_scalars_are_taken(als: AlchemistSession) -> None:
    echo = als.load_library("echo").echo
    A = als.send_matrix(np.eye(1))
    _, i, x, z, flag, *_ = echo(
        A, np.int32(5), np.float32(0.5), np.complex64(1j), np.bool_(True), ints=np.arange(3)
    )
    assert (i, x, z, flag) == (5, 0.5, 1j, True)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "needs 'A'"),
        (("A", 1.5), {}, "'i' to be of type int, not .*float"),
        (("A",), {"i": True}, "type int"),
        (("A",), {"i": 2**63}, "64 bits"),
        (("A",), {"text": 3}, "type string"),
        (("A",), {"flag": 1}, "type bool"),
        (("A",), {"ints": [1, "2"]}, r"list\[int\]"),
        (("A",), {"texts": "abc"}, r"list\[string\], not str"),
        (("A",), {"nosuch": 1}, "no parameter 'nosuch'"),
        (("A",), {"A": "A"}, "got 'A' twice"),
        ((np.eye(2),), {}, "send it first"),
        ((None,), {}, "type matrix"),
        (("A",) * 20, {}, "takes 10 arguments, not 20"),
    ],
)
def test_wrong_arguments_are_refused_with_the_right_signature(
    als: AlchemistSession, args: tuple, kwargs: dict, words: str
) -> None:
    A = als.send_matrix(np.eye(2))
    args = tuple(A if isinstance(a, str) and a == "A" else a for a in args)
    kwargs = {k: A if isinstance(v, str) and v == "A" else v for k, v in kwargs.items()}
    echo = als.load_library("echo")
    with pytest.raises(BadArgumentError, match=words) as caught:
        echo.echo(*args, **kwargs)
    assert "Its signature: echo(A: matrix" in str(caught.value)
    assert echo.who() == [0, 1]


def test_errors_for_unknown_names_list_the_known_ones(als: AlchemistSession) -> None:
    with pytest.raises(LibraryNotFoundError, match="Shipped: linalg"):
        als.load_library("no_such_library")
    with pytest.raises(LibraryNotFoundError, match="no file"):
        als.load_library("mine", "/nowhere/mine.py")
    with pytest.raises(NoSuchRoutineError, match=r"it has .*who"):
        _ = als.load_library("echo").whom
    with pytest.raises(NoSuchRoutineError, match=r"no routine 'whoo' \(did you mean 'who'\?\)"):
        _ = als.load_library("echo").whoo
    assert not hasattr(als.load_library("echo"), "whom")


def test_a_routine_changes_the_matrices_that_it_declares(
    als: AlchemistSession, tmp_path: Path
) -> None:
    path = library(
        tmp_path / "writing.py",
        '''
        @routine("n", writes=("A",))
        def both(ctx: Context, A: DistMatrix, B: DistMatrix) -> int:
            """A and B are doubled."""
            A.local[...] *= 2
            B.local[...] *= 2
            return 1
        ''',
    )
    mine = als.load_library("writing", str(path))
    A, B = als.send_matrix(np.eye(3)), als.send_matrix(np.ones(2))
    with pytest.raises(RoutineError, match="is read-only") as caught:
        mine.both(A, B)
    assert "declares writes=('A',), and changes another matrix" in (caught.value.traceback or "")
    np.testing.assert_array_equal(B.fetch(), np.ones(2))
    assert mine.both(A, A) == 1
    np.testing.assert_array_equal(A.fetch(), 8 * np.eye(3))


def test_a_user_library(als: AlchemistSession, tmp_path: Path) -> None:
    path = library(
        tmp_path / "mine.py",
        '''
        @routine("B", "calls")
        def twice(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, int]:
            """B = 2 A."""
            ctx.state["calls"] = ctx.state.get("calls", 0) + 1
            B = ctx.empty_like(A)
            B.local[...] = 2 * A.local
            return B, ctx.state["calls"]
        ''',
    )
    mine = als.load_library("mine", path)
    A = als.send_matrix(np.arange(12.0).reshape(4, 3))
    assert mine.twice(A)[1] == 1
    B, calls = mine.twice(A)
    assert calls == 2
    assert als.load_library("mine", path).twice(A)[1] == 3  # it is loaded: its state stays
    assert als.load_library("mine", path, reload=True).twice(A)[1] == 1
    np.testing.assert_array_equal(B.fetch(), 2 * A.fetch())
    path.write_text(path.read_text().replace("2 * A.local", "3 * A.local"))
    B, calls = als.load_library("mine", path).twice(A)
    assert calls == 1  # the file has changed: loaded again, with a new state
    np.testing.assert_array_equal(B.fetch(), 3 * A.fetch())


def test_a_library_has_seconds_to_close(cluster: str, tmp_path: Path) -> None:
    """Ranks were killed one second after they had been asked to end."""
    path = library(
        tmp_path / "mine.py",
        """
        import time

        @routine("rank")
        def where(ctx: Context, folder: str) -> int:
            ctx.state["file"] = f"{folder}/closed-{ctx.rank}"
            return ctx.rank

        def close(state: dict) -> None:
            time.sleep(1.5)
            open(state["file"], "w").close()
        """,
    )
    with AlchemistSession(2) as als:
        als.load_library("slow", path).where(str(tmp_path))
    assert sorted(p.name for p in tmp_path.glob("closed-*")) == ["closed-0", "closed-1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "declares no routine"),
        ("1/0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        (
            "@routine('x')\ndef f(ctx: Context) -> dict:\n    return {}",
            "cannot be the type of a parameter",
        ),
        ("@routine()\ndef f(ctx: Context, a) -> None: ...", "has no annotation"),
        ("@routine('a', 'b')\ndef f(ctx: Context) -> int: ...", "names 2 results"),
    ],
)
def test_a_library_that_does_not_load_is_reported_with_the_reason(
    als: AlchemistSession, tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(LibraryLoadError, match=words):
        als.load_library("mine", library(tmp_path / "mine.py", text))
    assert als.load_library("echo").who() == [0, 1]


def test_a_slow_load_is_told(
    als: AlchemistSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`load_library("sklearn")` imported for 23 s before it was refused, without a word."""
    path = library(tmp_path / "mine.py", "import time\ntime.sleep(3.5)")
    with pytest.raises(LibraryLoadError, match="is imported in functions"):
        als.load_library("slow", path)
    assert "the ranks still load library 'slow'" in capfd.readouterr().err


@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_a_failing_rank_fails_the_call_and_not_the_gang(als: AlchemistSession, rank: int) -> None:
    echo = als.load_library("echo")
    A = als.send_matrix(np.eye(3))
    for _ in range(3):
        with pytest.raises(RoutineError, match="ValueError: no luck") as caught:
            echo.fail(rank, "no luck")
        assert caught.value.rank == max(rank, 0)
        assert "raise ValueError(message)" in caught.value.traceback
        assert echo.who() == [0, 1]
    np.testing.assert_array_equal(A.fetch(), np.eye(3))


def test_a_result_of_the_wrong_type_fails_the_call(als: AlchemistSession, tmp_path: Path) -> None:
    path = library(
        tmp_path / "mine.py",
        """
        @routine("x")
        def wrong(ctx: Context) -> int:
            return "three"

        @routine("A", "B")
        def uneven(ctx: Context) -> tuple[DistMatrix, DistMatrix]:
            return ctx.zeros((2, 2), "float64"), ctx.zeros((2 + ctx.rank, 2), "float64")
        """,
    )
    mine = als.load_library("mine", path)
    with pytest.raises(RoutineError, match="declares its result 'x' as int"):
        mine.wrong()
    with pytest.raises(RoutineError, match="other shapes or layouts"):
        mine.uneven()
    assert als.list_matrices() == []


def test_remote_returns_at_once_and_raises_the_same_errors(als: AlchemistSession) -> None:
    echo = als.load_library("echo")
    A = als.send_matrix(np.eye(3))
    twin, *_ = ray.get(echo.echo.remote(A))
    np.testing.assert_array_equal(twin.fetch(), np.eye(3))
    with pytest.raises(RoutineError, match="no luck"):
        ray.get(echo.fail.remote(1, "no luck"))
    with pytest.raises(BadArgumentError):
        echo.fail.remote("x")
    calls = [echo.who.remote() for _ in range(20)]
    assert ray.get(calls) == [[0, 1]] * 20


def test_a_library_and_its_routines_work_in_ray_tasks(als: AlchemistSession) -> None:
    echo = als.load_library("echo")
    short = echo.sleep.options(timeout_s=0.5)
    A = als.send_matrix(np.eye(3))

    @ray.remote(num_cpus=0)
    def called(library: Any) -> tuple[Any, str]:
        with pytest.raises(CallTimeoutError):
            short(60.0)
        twin, *_ = echo.echo(A)  # the closure's own
        return (library.who(), *library.echo(twin)), library.who.__doc__

    (ranks, twin, *_), text = ray.get(called.remote(echo))
    assert ranks == [0, 1]
    assert text == echo.who.__doc__
    np.testing.assert_array_equal(twin.fetch(), np.eye(3))
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(echo))))
    assert again.who() == [0, 1]
    assert repr(again) == repr(echo)


def test_what_cannot_be_pickled_says_what_to_pass_instead(als: AlchemistSession) -> None:
    with pytest.raises(TypeError, match="a session cannot be pickled: pass handles and libraries"):
        pickle.dumps(als)
    echo = als.load_library("echo")
    with pytest.raises(BadArgumentError, match="'echo' is called by processes outside"):
        als.run(lambda comm: echo.who())
    with pytest.raises(BadArgumentError, match=r"'echo\.who' is called by processes outside"):
        als.run(lambda comm, who: who(), echo.who)


def test_a_library_in_a_task_of_a_gang_that_has_ended(cluster: str) -> None:
    with AlchemistSession(1) as als:
        pickled = pickle.dumps(als.load_library("echo"))
        als.yield_workers()
        als.request_workers(1)
        with pytest.raises(AlchemistError, match="'echo' is not loaded"):
            pickle.loads(pickled).who()
    with pytest.raises(StaleHandleError, match=r"library echo .* has ended: make or load it"):
        pickle.loads(pickled).who()


def test_a_library_of_a_yielded_gang_is_refused(cluster: str) -> None:
    with AlchemistSession(1) as als:
        echo = als.load_library("echo")
        als.yield_workers()
        with pytest.raises(SessionError, match=r"has ended.*load_library\(\.\.\.\) again"):
            echo.who()
        als.request_workers(1)
        with pytest.raises(SessionError, match=r"has ended"):
            echo.who()
        assert als.load_library("echo").who() == [0]
