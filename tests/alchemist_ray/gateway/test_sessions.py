"""What sessions do through a gateway, from processes without Ray and MPI."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    AuthError,
    BadArgumentError,
    CallTimeoutError,
    CancelledError,
    GroupError,
    LibraryNotFoundError,
    MatrixError,
    MatrixNotFoundError,
    ResourceError,
    RoutineError,
    SessionError,
    StaleHandleError,
)
from alchemist_ray.gateway.server.actor import GatewayInfo
from tests.alchemist_ray.gateway.conftest import Client, blocking, thin_environment
from tests.support import traces

ATTACH_LIMIT_S = 2.0  # after a client was killed


@pytest.fixture(scope="module")
def als(there: dict[str, Any]) -> Iterator[AlchemistSession]:
    with AlchemistSession(3, **there) as session:
        yield session


def test_a_process_with_numpy_and_msgpack_alone_uses_a_gang(client: Client) -> None:
    done = client(
        """
        import numpy as np
        from alchemist_ray import AlchemistSession

        with AlchemistSession(2) as als:
            A = np.random.default_rng(1).random((300, 40))
            handle = als.send_matrix(A, layout="MC_MR", print_times=True)
            assert np.array_equal(handle.fetch(), A)
            S, U, V = als.load_library("linalg").truncated_svd(handle, rank=3)
            assert np.allclose(S.fetch(), np.linalg.svd(A, compute_uv=False)[:3])
            assert np.allclose(np.asarray(handle @ handle.T), A @ A.T)
            assert len(als.list_workers()) == 2
            try:
                als.run(len)
            except TypeError as error:
                print(error)
        """,
        "cloudpickle",
    )
    assert "Data transfer times breakdown" in done.stdout
    assert "pip install cloudpickle" in done.stdout


def test_the_listing_of_the_paper_runs_with_the_address_in_connect(
    client: Client, gateway: GatewayInfo
) -> None:
    done = client(
        f"""
        import numpy as np
        from alchemist_ray import AlchemistSession

        als = AlchemistSession()
        als.connect_to_alchemist("0.0.0.0", {gateway.port})
        als.request_workers(3)
        TestLib = als.load_library("linalg")
        A = np.random.default_rng(2).random((1000, 1000))
        A_handle = als.send_matrix(matrix=A, print_times=True, layout="VC_STAR")
        S_handle, U_handle, V_handle = TestLib.truncated_svd(A_handle, 10)
        S = als.fetch_matrix(S_handle, print_times=True)
        print("first", round(float(S[0])), "second", round(float(S[1]), 1))
        als.stop()
        """,
        ALCHEMIST_ADDRESS="",
    )
    assert "first 500 second 18" in done.stdout


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(7,), (1, 1), (0, 3), (3001, 257), (40, 40_000), (600_000, 2)])
def test_matrices_travel_unchanged_in_both_orders(
    als: AlchemistSession, shape: tuple[int, ...], order: Any
) -> None:
    sent = np.random.default_rng(3).integers(-99, 99, shape).astype(np.float32, order=order)
    for layout in ("VC_STAR", "MC_MR", "STAR_VR", "BLOCK", "BLOCK_CYCLIC:7"):
        handle = als.send_matrix(sent, layout=layout)
        assert np.array_equal(handle.fetch(), sent)
        handle.free()


def test_parts_strides_types_and_copies_travel(als: AlchemistSession) -> None:
    base = np.arange(2000.0 * 300).reshape(2000, 300)
    for sent in (base[::-2, 5:250:3], base.T[:, ::7], np.broadcast_to(base[0], (5, 300))):
        assert np.array_equal(als.send_matrix(sent).fetch(), sent)
    narrow = als.send_matrix(base, dtype="float32", layout="STAR_STAR")
    assert narrow.dtype == np.float32
    assert np.array_equal(narrow.fetch(rows=slice(100, 110), cols=7), base[100:110, 7:8])
    assert np.array_equal(als.send_blocks(iter(np.split(base, 4)), shape=base.shape).fetch(), base)


def test_errors_have_their_class_and_facts(als: AlchemistSession) -> None:
    lib = als.load_library("linalg")
    with pytest.raises(BadArgumentError, match="rank"):
        lib.truncated_svd(als.send_matrix(np.eye(3)))
    with pytest.raises(LibraryNotFoundError):
        als.load_library("no_such_library")
    with pytest.raises(GroupError, match="3 workers already"):
        als.request_workers(2)
    handle = als.send_matrix(np.eye(3))
    handle.free()
    with pytest.raises(MatrixNotFoundError):
        handle.fetch()
    with pytest.raises(MatrixNotFoundError, match="no matrix 'nothing'"):
        als.matrix("nothing")


def test_handles_free_their_matrices(als: AlchemistSession) -> None:
    before = {handle.id for handle in als.list_matrices()}
    kept = als.send_matrix(np.eye(3), name="kept")
    dropped = als.send_matrix(np.eye(4))
    number = dropped.id
    del dropped

    def now() -> set[int]:
        return {handle.id for handle in als.list_matrices()}

    assert traces.wait_until(lambda: number not in now(), 10, 0.05) is not None
    assert kept.id in now() - before
    assert als.matrix("kept").id == kept.id
    kept.free()


def test_functions_run_with_arguments_results_output_and_progress(
    als: AlchemistSession, capfd: pytest.CaptureFixture[str]
) -> None:
    def scaled(comm: Any, part: Any, factor: float) -> Any:
        print(f"rank {comm.rank} works")
        return factor * comm.allreduce(float(part.local.sum()))

    A = np.random.default_rng(4).random((50, 8))
    assert np.isclose(als.run(scaled, als.send_matrix(A), 2.0), 2 * A.sum())
    assert capfd.readouterr().out.count("works") == 3
    large = np.arange(3_000_000.0)  # more than a frame holds, both ways
    returned = als.run(lambda comm, x: x + comm.size, large)
    assert np.array_equal(returned, large + 3)

    def fails(comm: Any) -> None:
        raise ValueError(f"on {comm.rank}")

    with pytest.raises(RoutineError, match=r"on \d"):
        als.run(fails)
    with pytest.raises(CallTimeoutError):
        als.run(lambda comm: __import__("time").sleep(30), timeout_s=0.5)


def test_progress_signatures_and_documentation_come_through(
    there: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with AlchemistSession(1, **there, progress=True) as als:
        sleep = als.load_library("echo").sleep
        sleep(0.3)
        als.send_matrix(np.eye(50)).fetch()
        assert list(inspect.signature(sleep).parameters) == ["seconds"]
        assert "Sleep on every rank" in sleep.__doc__
    shown = capfd.readouterr().err
    for bar in ("sleeping", "send", "fetch"):
        assert bar in shown


def test_scripts_run(als: AlchemistSession, tmp_path: Path, capfd: Any) -> None:
    script = tmp_path / "hello.py"
    script.write_text("from mpi4py import MPI\nprint('sum', MPI.COMM_WORLD.allreduce(1))\n")
    als.run_script(script)
    assert capfd.readouterr().out.count("sum 3") == 3


def test_a_remote_call_is_a_future(als: AlchemistSession) -> None:
    A = np.random.default_rng(5).random((30, 30))
    handle = als.send_matrix(A)
    lib = als.load_library("linalg")
    future = lib.norm.remote(handle)
    assert isinstance(future, concurrent.futures.Future)
    assert np.isclose(future.result(30), np.linalg.norm(A))
    several = [lib.matmul.remote(handle, handle) for _ in range(5)]
    for done in concurrent.futures.as_completed(several, 30):
        assert np.allclose(done.result().fetch(), A @ A)
    with pytest.raises(MatrixError):
        lib.norm.remote(replaced(handle)).result(30)

    async def awaited() -> Any:
        return await asyncio.wrap_future(lib.norm.remote(handle))

    assert np.isclose(asyncio.run(awaited()), np.linalg.norm(A))


def replaced(handle: Any) -> Any:
    """A handle of a matrix that is gone."""
    gone = handle + 0
    gone.free()
    return gone


def test_calls_are_cancelled(als: AlchemistSession) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(als.run, lambda comm: __import__("time").sleep(60))
        assert traces.wait_until(lambda: bool(als.list_calls()), 20, 0.05) is not None
        assert als.cancel() == 1
        with pytest.raises(CancelledError):
            waiting.result(20)
    assert als.run(lambda comm: comm.size) == 3


def test_files_are_the_servers(als: AlchemistSession, tmp_path: Path) -> None:
    A = np.random.default_rng(6).random((20, 6))
    als.send_matrix(A).save(tmp_path / "a.npy")
    assert np.array_equal(np.load(tmp_path / "a.npy"), A)
    loaded = als.load_matrix(tmp_path / "a.npy", layout="MC_MR")
    assert np.array_equal(loaded.fetch(), A)
    als.checkpoint(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "manifest.json").exists()


def test_gangs_are_listed_attached_to_and_stopped(there: dict[str, Any]) -> None:
    with AlchemistSession(2, name="thin-named", lifetime="detached", **there) as first:
        first.send_matrix(np.eye(3), name="A")
        first.load_library("linalg")
    with AlchemistSession.attach("thin-named", **there) as second:
        assert np.array_equal(second.matrix("A").fetch(), np.eye(3))
        assert second.list_libraries() == ["linalg"]
        with pytest.raises(GroupError, match="thin-named"):
            AlchemistSession(1, name="thin-named", **there)
    found = {gang.name: gang for gang in AlchemistSession.list(**there)}
    assert found["thin-named"].workers == 2
    AlchemistSession.stop_gang("thin-named", **there)
    assert "thin-named" not in {gang.name for gang in AlchemistSession.list(**there)}
    with pytest.raises(SessionError, match="no gang 'thin-named'"):
        AlchemistSession.attach("thin-named", **there)


def test_a_killed_client_is_replaced_in_two_seconds(there: dict[str, Any]) -> None:
    program = """
        import time
        import numpy as np
        from alchemist_ray import AlchemistSession

        als = AlchemistSession(2, name="thin-killed", lifetime="detached")
        als.send_matrix(np.arange(12.0).reshape(3, 4), name="A")
        print("ready", flush=True)
        time.sleep(60)
    """
    words = [sys.executable, "-c", blocking() + textwrap.dedent(program)]
    with subprocess.Popen(
        words, env=thin_environment(there), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        begun = traces.clock()
        with AlchemistSession.attach("thin-killed", **there) as again:
            assert np.array_equal(again.matrix("A").fetch(), np.arange(12.0).reshape(3, 4))
        assert traces.clock() - begun < ATTACH_LIMIT_S
    AlchemistSession.stop_gang("thin-killed", **there)


def test_a_private_gang_ends_with_its_session(there: dict[str, Any]) -> None:
    session = AlchemistSession(1, **there)
    gang = session.connection.address.gang
    handle = session.send_matrix(np.eye(2))
    assert gang in {one.name for one in AlchemistSession.list(**there)}
    pickled = pickle.dumps(handle)
    session.yield_workers()
    assert gang not in {one.name for one in AlchemistSession.list(**there)}
    session.request_workers(1)
    with pytest.raises((StaleHandleError, SessionError)):
        handle.fetch()
    assert pickle.loads(pickled).id == handle.id
    session.stop()


def test_handles_and_libraries_of_a_gang_that_has_ended_say_so(
    client: Client, there: dict[str, Any]
) -> None:
    done = client(
        f"""
        from alchemist_ray import AlchemistError, AlchemistSession

        with AlchemistSession(1, **{there!r}) as als:
            A, linalg = als.send_matrix([[1.0]]), als.load_library("linalg")
            als.yield_workers()
            als.request_workers(1)
            B = als.send_matrix([[1.0]])
            for call in (A.fetch, lambda: linalg.norm(B)):
                try:
                    call()
                except AlchemistError as error:
                    print(type(error).__name__, error)
        """,
        ALCHEMIST_ADDRESS="",
        ALCHEMIST_TOKEN="",
    )
    assert (
        "StaleHandleError no session of this process is connected to the gang of matrix1"
        in done.stdout
    )
    assert "load_library(...) again in the session's new gang" in done.stdout


def test_more_workers_than_there_are_cpus_are_refused(there: dict[str, Any]) -> None:
    with pytest.raises(ResourceError, match="1000"):
        AlchemistSession(1000, **there)


def test_a_session_without_workers_needs_a_gateway_that_accepts_it(gateway: GatewayInfo) -> None:
    with pytest.raises(AuthError):
        AlchemistSession(address=gateway.address, token="wrong")
    with pytest.raises(SessionError, match="no gateway answers"):
        AlchemistSession(address="alchemist://127.0.0.1:1", token="alch_1_2")


def test_what_cannot_work_says_why(als: AlchemistSession, client: Client) -> None:
    with pytest.raises(SessionError, match="cannot start one"):
        als.serve()
    with pytest.raises(ValueError, match="placement"):
        AlchemistSession(address="alchemist://127.0.0.1:1", token="x", placement="inherit")
    with pytest.raises(ValueError, match="start a detached gang there"):
        AlchemistSession(address="alchemist://127.0.0.1:1", token="x", max_failures=1)
    program = "from alchemist_ray import AlchemistSession\nAlchemistSession(1)\n"
    done = client(program, code=1, ALCHEMIST_ADDRESS="")
    assert "Ray is not installed here, and no gateway is known" in done.stderr


def test_sessions_inside_and_through_a_gateway_share_a_gang_in_one_process(
    there: dict[str, Any],
) -> None:
    with AlchemistSession(2, name="thin-both", lifetime="detached") as inside:
        A = inside.send_matrix(np.eye(3), name="A")
        with AlchemistSession.attach("thin-both", **there) as thin:
            B = thin.matrix("A")
            for handle in (A, B, A + 1, B + 1):
                assert handle.fetch().shape == (3, 3)
            assert not inside.connection.closed
            assert not thin.connection.closed
        assert np.array_equal(inside.matrix("A").fetch(), np.eye(3))
        assert float(inside.load_library("linalg").norm(A)) == pytest.approx(np.sqrt(3))
    AlchemistSession.stop_gang("thin-both")


def test_the_name_of_a_gang_that_has_ended_can_be_used_again(there: dict[str, Any]) -> None:
    with AlchemistSession(1, **there, name="again", lifetime="detached"):
        pass
    AlchemistSession.stop_gang("again")  # in the cluster: the gateway is not told
    with AlchemistSession(1, name="again", lifetime="detached") as inside:
        try:
            inside.send_matrix(np.ones((3, 3)), name="A")
            with AlchemistSession.attach("again", **there) as als:
                assert als.matrix("A").fetch().sum() == 9
        finally:
            AlchemistSession.stop_gang("again")
