"""What a successful call leaves in MPI ends with it: the next calls are as in new ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession, Executor
from alchemist_ray.errors import RoutineError
from tests.support.suite import scaled

LIMIT_S = 20.0  # of calls that take milliseconds, and hang if they meet what was left
PRODUCT_TAGS = range(11, 17)  # of mpi_workers/matrix/tags.py
CALLS = scaled(60, 1000)


# --- what a call leaves ---


def isend(comm: Any) -> None:
    if comm.rank == 1:
        comm.isend("of the first call", dest=0, tag=7)
    if comm.rank == 0:
        comm.isend("of the first call", dest=1, tag=7)


def isend_large(comm: Any) -> None:
    comm.Isend(np.full(1 << 18, 1e6), dest=1 - comm.rank, tag=7)


def issend(comm: Any) -> None:
    comm.issend("of the first call", dest=1 - comm.rank, tag=7)


def irecv(comm: Any) -> None:
    comm.irecv(source=1 - comm.rank, tag=7)


def irecv_of_any_tag(comm: Any) -> None:
    from mpi4py import MPI  # noqa: PLC0415

    comm.Irecv(np.zeros(4), MPI.ANY_SOURCE, MPI.ANY_TAG)


def receives_in_world(comm: Any) -> None:
    from mpi4py import MPI  # noqa: PLC0415

    MPI.COMM_WORLD.Irecv(np.zeros(4), MPI.ANY_SOURCE, MPI.ANY_TAG)


def sends_in_world(comm: Any) -> None:
    from mpi4py import MPI  # noqa: PLC0415

    MPI.COMM_WORLD.isend("of the first call", dest=1 - comm.rank, tag=7)


def persistent(comm: Any) -> None:
    comm.Recv_init(np.zeros(4), source=1 - comm.rank, tag=7).Start()


def ibarrier(comm: Any) -> None:
    if comm.rank == 0:
        comm.Ibarrier()


def iallreduce(comm: Any) -> None:
    if comm.rank == 1:
        comm.Iallreduce(np.full(2, 100.0), np.zeros(2))


def collective_of_all(comm: Any) -> None:
    comm.Iallreduce(np.full(2, 100.0), np.zeros(2))


def errhandler(comm: Any) -> None:
    from mpi4py import MPI  # noqa: PLC0415

    for its in (comm, MPI.COMM_WORLD, MPI.COMM_SELF):
        its.Set_errhandler(MPI.ERRORS_ARE_FATAL)


def attached_buffer(comm: Any) -> None:
    from mpi4py import MPI  # noqa: PLC0415

    MPI.Attach_buffer(bytearray(1 << 16))
    comm.Bsend(np.full(4, 1e6), dest=1 - comm.rank, tag=7)


LEFT: list[Callable[[Any], None]] = [
    isend, isend_large, issend, irecv, irecv_of_any_tag, receives_in_world, sends_in_world,
    persistent, ibarrier, iallreduce, collective_of_all, errhandler, attached_buffer,
]  # fmt: skip


# --- the next call ---


def exchanged(comm: Any) -> list[Any]:
    """A message of each rank to the next, a sum, in the call's communicator and in COMM_WORLD."""
    from mpi4py import MPI  # noqa: PLC0415

    found = []
    for its in (comm, MPI.COMM_WORLD):
        x, y = np.ones(2), np.zeros(2)
        request = its.isend("fresh", dest=1 - its.rank, tag=7)
        found.append(its.recv(source=MPI.ANY_SOURCE, tag=7))
        request.wait()
        its.Allreduce(x, y)
        found += [y.tolist(), its.bcast(its.allreduce(1), root=1)]
    try:
        comm.Send(x, dest=99)
    except MPI.Exception:
        found.append("raised")
    MPI.Attach_buffer(bytearray(1 << 16))
    MPI.Detach_buffer()
    return comm.gather(found)


EXPECTED = [["fresh", [2.0, 2.0], 2] * 2 + ["raised"]] * 2


@pytest.fixture(scope="module")
def session(cluster: str) -> Iterator[AlchemistSession]:
    """A gang whose calls end when they hang. What any test leaves reaches the others, if it can."""
    with AlchemistSession(2, stuck_timeout_s=LIMIT_S, progress=False) as opened:
        yield opened


@pytest.mark.parametrize("leave", LEFT)
def test_the_next_calls_get_nothing_of_it(
    session: AlchemistSession, leave: Callable[[Any], None]
) -> None:
    X = np.random.default_rng(0).normal(size=(60, 7))
    A = session.send_matrix(X)
    for _ in range(2):
        session.run(leave, timeout_s=LIMIT_S)
        assert session.run(exchanged, timeout_s=LIMIT_S) == EXPECTED
    session.run(leave, timeout_s=LIMIT_S)
    assert np.allclose((A.T @ A).fetch(), X.T @ X)
    assert np.allclose(A.sum(axis=0).fetch(), X.sum(axis=0))


def leave_product_message(comm: Any, tag: int) -> None:
    comm.Isend(np.full(4, 1e6), dest=1 - comm.rank, tag=tag)


def _operations() -> dict[str, tuple[Callable[..., Any], Any]]:
    random = np.random.default_rng(0)
    X, Y, Z = (random.normal(size=shape) for shape in ((60, 7), (7, 60), (60, 60)))
    return {
        "product": (lambda A, B, C: (A @ B).fetch(), X @ Y),
        "square product": (lambda A, B, C: (C @ C).fetch(), Z @ Z),
        "qr": (lambda A, B, C: abs(np.linalg.qr(A)[1].fetch()), abs(np.linalg.qr(X)[1])),
        "solve": (
            lambda A, B, C: np.linalg.solve(C, np.ones(60)).fetch(),
            np.linalg.solve(Z, np.ones(60)),
        ),
        "svd": (
            lambda A, B, C: np.linalg.svd(A, full_matrices=False)[1].fetch(),
            np.linalg.svd(X, full_matrices=False)[1],
        ),
        "sum": (lambda A, B, C: A.sum(axis=0).fetch(), X.sum(axis=0)),
        "sort": (lambda A, B, C: np.sort(A, axis=0).fetch(), np.sort(X, axis=0)),
        "layout": (lambda A, B, C: C.to_layout("STAR_VC").fetch(), Z),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(_operations()))
def test_a_message_with_the_tag_of_an_operation_of_ours_is_not_taken_for_its_data(
    session: AlchemistSession, name: str
) -> None:
    random = np.random.default_rng(0)
    A, B, C = (
        session.send_matrix(random.normal(size=shape)) for shape in ((60, 7), (7, 60), (60, 60))
    )
    operation, expected = _operations()[name]
    for tag in PRODUCT_TAGS:
        session.run(leave_product_message, tag, timeout_s=LIMIT_S)
        assert np.allclose(operation(A, B, C), expected), tag


def test_the_notice_names_the_call_and_what_it_left(
    session: AlchemistSession, capfd: pytest.CaptureFixture[str]
) -> None:
    for leave, words in ((isend, "1 message"), (irecv, "1 operation")):
        session.run(leave, timeout_s=LIMIT_S)
        session.run(exchanged, timeout_s=LIMIT_S)
        said = "".join(capfd.readouterr())
        assert leave.__name__ in said, said
        assert words in said, said
    session.run(exchanged, timeout_s=LIMIT_S)
    assert "has left" not in "".join(capfd.readouterr())


def test_scripts_get_nothing_of_it(
    session: AlchemistSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    leaves, receives = tmp_path / "leaves.py", tmp_path / "receives.py"
    leaves.write_text(
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.isend('old', dest=1 - MPI.COMM_WORLD.rank, tag=7)\n"
        "MPI.COMM_WORLD.Irecv(bytearray(8), source=1 - MPI.COMM_WORLD.rank, tag=8)\n"
    )
    receives.write_text(
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD\n"
        "for tag in (7, 8):\n"
        "    request = comm.isend('fresh', dest=1 - comm.rank, tag=tag)\n"
        "    print('received', comm.recv(tag=tag))\n"
        "    request.wait()\n"
    )
    for _ in range(2):
        session.run_script(leaves, timeout_s=LIMIT_S)
        session.run_script(receives, timeout_s=LIMIT_S)
    said = capfd.readouterr().out
    assert said.count("received fresh") == 8
    assert "received old" not in said


def test_unrelated_futures_of_an_executor_get_nothing_of_it(cluster: str) -> None:
    with Executor(num_workers=2, max_gangs=1) as executor:
        for leave in (isend, irecv, sends_in_world):
            executor.submit(leave).result(LIMIT_S)
            assert executor.submit(exchanged).result(LIMIT_S) == EXPECTED


def all_raise(comm: Any) -> None:
    from mpi4py import MPI  # noqa: PLC0415

    MPI.COMM_WORLD.Allreduce(np.ones(2), np.zeros(2))
    MPI.COMM_WORLD.Send(np.full(2, 1e6), dest=1 - comm.rank, tag=7)
    raise ValueError


def one_leaves_a_broadcast_out(comm: Any) -> None:
    from mpi4py import MPI  # noqa: PLC0415

    if comm.rank == 0:
        MPI.COMM_WORLD.Bcast(np.full(2, 1e6))
    comm.Barrier()  # else rank 1 may end the call before rank 0 has begun it
    raise ValueError


@pytest.mark.parametrize(
    ("fail", "others"), [(all_raise, False), (one_leaves_a_broadcast_out, True)]
)
def test_a_call_that_fails_costs_processes_if_a_rank_has_left_a_collective_out(
    session: AlchemistSession, fail: Callable[[Any], None], others: bool
) -> None:
    """Communicators that outlive the call are then in other states on other ranks."""
    before = [worker.pid for worker in session.list_workers()]
    with pytest.raises(RoutineError, match="ValueError"):
        session.run(fail, timeout_s=LIMIT_S)

    def broadcast(comm: Any) -> list[Any]:
        from mpi4py import MPI  # noqa: PLC0415

        x = np.full(2, 3.0 + comm.rank)
        MPI.COMM_WORLD.Bcast(x)
        return comm.gather(x.tolist())

    assert session.run(broadcast, timeout_s=LIMIT_S) == [[3.0, 3.0]] * 2
    assert session.run(exchanged, timeout_s=LIMIT_S) == EXPECTED
    assert ([worker.pid for worker in session.list_workers()] != before) == others


# Of each way to make a communicator: one that has all ranks.
MAKERS: dict[str, Callable[[Any], Any]] = {
    "Dup": lambda comm: comm.Dup(),
    "Dup_with_info": lambda comm: comm.Dup_with_info(comm.Get_info()),
    "Idup": lambda comm: (lambda made, request: (request.Wait(), made)[1])(*comm.Idup()),
    "Split": lambda comm: comm.Split(0, comm.rank),
    "Split_type": lambda comm: comm.Split_type(1),  # MPI.COMM_TYPE_SHARED
    "Create": lambda comm: comm.Create(comm.group),
    "Create_group": lambda comm: comm.Create_group(comm.group),
    "Create_from_group": lambda comm: type(comm).Create_from_group(comm.group, "kept"),
    "Create_cart": lambda comm: comm.Create_cart([comm.size]),
    "Create_graph": lambda comm: comm.Create_graph([1, 2], [1, 0]),
    "Create_dist_graph": lambda comm: comm.Create_dist_graph([comm.rank], [1], [1 - comm.rank]),
    "Create_intercomm": lambda comm: comm.Split(comm.rank).Create_intercomm(
        0, comm, 1 - comm.rank
    ).Merge(),
}  # fmt: skip


@pytest.mark.parametrize("maker", MAKERS)
def test_a_communicator_that_is_kept_is_known_however_it_was_made(
    session: AlchemistSession, maker: str
) -> None:
    make = MAKERS[maker]

    def keep(comm: Any) -> int:
        from mpi4py import MPI  # noqa: PLC0415

        MPI.kept = make(comm)
        return int(MPI.kept.allreduce(1))

    def fail(comm: Any) -> None:
        from mpi4py import MPI  # noqa: PLC0415

        if comm.rank == 0:
            MPI.kept.Bcast(np.full(2, 1e6))
        comm.Barrier()
        raise ValueError

    before = [worker.pid for worker in session.list_workers()]
    assert session.run(keep, timeout_s=LIMIT_S) == 2
    with pytest.raises(RoutineError, match="ValueError"):
        session.run(fail, timeout_s=LIMIT_S)
    session.run(exchanged, timeout_s=LIMIT_S)
    assert [worker.pid for worker in session.list_workers()] != before


def test_such_calls_use_up_no_communicators(session: AlchemistSession) -> None:
    def spare(comm: Any) -> int:
        from mpi4py import MPI  # noqa: PLC0415

        made = []
        try:
            while len(made) < 3000:
                made.append(MPI.COMM_SELF.Dup())
        except MPI.Exception:
            pass
        for one in made:
            one.Free()
        return len(made)

    before = session.run(spare, timeout_s=LIMIT_S)
    for _ in range(CALLS // 2):
        session.run(isend)
        session.run(irecv)
    assert session.run(spare, timeout_s=LIMIT_S) == before
    assert session.run(exchanged, timeout_s=LIMIT_S) == EXPECTED
