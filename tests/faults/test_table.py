"""The cells of the table of faults that take one step (`table.CELLS`), with the same checks each.

After each: the error in time; no process, socket, file in /dev/shm or reservation of CPUs left; a
gang of another session works as before; the session's next gang works, or the gang has all its
matrices again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray.errors import GroupRecoveredError
from tests.faults.conftest import (
    ERROR_LIMIT_S,
    LIBRARY,
    Gang,
    Outcome,
    assert_clean,
    inject_and_retry,
    inject_during,
    kill,
    pid_of,
    record,
    until_replaced,
)
from tests.faults.recovery.conftest import BACK_LIMIT_S, Recovering, X
from tests.faults.table import CELLS, Cell, marked, unknown
from tests.faults.test_transfers import halfway, held_by, outcome_of, tall
from tests.support import traces

__all__ = ["tall"]  # a fixture


RANK = {"idle": 1, "in a call": 0, "others wait": 1, "sending": 1, "fetching": -1}  # of the gang


def victim(cell: Cell, gang: Gang | Recovering) -> tuple[list[int], tuple[str, ...]]:
    """The processes to end, and the words that the error must have."""
    node = os.uname().nodename
    if cell.victim == "rank":
        number = RANK[cell.how if cell.how in RANK else cell.moment] % len(gang.ranks)
        words = (f"rank {number}",) if cell.kind == "mpiexec" else (f"rank {number}", "SIGKILL")
        pid = gang.ranks[number]
        return [pid], (*words, str(pid)) if cell.moment == "idle" else words
    if cell.victim == "all ranks":
        return gang.ranks, ("SIGKILL",)
    if cell.victim == "data endpoint":
        return [gang.endpoint], ("data endpoint", "SIGKILL")
    if cell.victim == "GroupManager":
        lost = ("GroupManager", "was lost") if cell.moment == "sending" else ("GroupManager",)
        return [pid_of(gang.manager)], lost
    parent = gang.proxy  # of the ranks
    if cell.victim == "mpiexec":
        return [parent], ("mpiexec", "ended")
    noted = Path(tempfile.gettempdir()).glob("alchemist-g*/pid")  # for a pod's preStop: kuberay/
    assert parent in [int(path.read_text()) for path in noted]
    taken = "is being taken away (SIGTERM)" if cell.how == "SIGTERM" else "was lost"
    return [parent], (f"node {node} {taken}",)


def strike(
    cell: Cell, session: Any, lib: Any, cause: Callable[[], Any], tall: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Outcome:  # fmt: skip
    """Cause the fault at its moment."""
    if cell.moment == "idle" and cell.outcome == "renewed":
        before = {worker.pid for worker in session.list_workers()}
        cause()
        return Outcome(until_replaced(session, before, BACK_LIMIT_S))
    if cell.moment == "idle":
        return inject_and_retry(cause, session.list_workers)
    if cell.moment == "in a call" and cell.how == "others wait":
        return inject_during(cause, lambda: lib.collective(missing=RANK[cell.how], native=True))
    if cell.moment == "in a call":
        return inject_during(cause, lambda: lib.churn(30.0))
    with monkeypatch.context() as patch:
        move = lambda: session.send_matrix(tall)  # noqa: E731
        if cell.moment == "fetching":
            move = session.send_matrix(tall).fetch
        return outcome_of(move, halfway(patch, cause))


@contextlib.contextmanager
def opened(cell: Cell, request: pytest.FixtureRequest) -> Iterator[Gang]:
    """A gang of this kind; the tests with private gangs share one."""
    if cell.kind == "private":
        yield request.getfixturevalue("gang")
        return
    options: dict[str, dict[str, Any]] = {
        "mpiexec": {"launcher": "mpiexec"},
        "named": {"name": "table"},
        "max_failures": {"max_failures": 5},
    }
    gang = Gang(2, **options[cell.kind])
    try:
        yield gang
    finally:
        gang.session.close()
    assert_clean(gang.before)


@pytest.mark.parametrize("cell", [each for each in CELLS if each.outcome == "lost"], ids=str)
def test_a_fault_ends_the_gang(
    cell: Cell, bystander: Gang, request: pytest.FixtureRequest,
    tall: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with opened(cell, request) as gang:
        pids, words = victim(cell, gang)
        ranks, number = gang.ranks, signal.SIGTERM if cell.how == "SIGTERM" else signal.SIGKILL

        def cause() -> None:
            for pid in pids:
                kill(pid, number)
            if cell.moment == "fetching":  # a fetch could end before the ranks do
                ended = traces.wait_until(lambda: not any(map(traces.alive, ranks)), ERROR_LIMIT_S)
                assert ended is not None

        outcome = strike(cell, gang.session, gang.lib, cause, tall, monkeypatch)
        gang.lost(str(cell), outcome, *words)
        if cell.moment == "sending":
            assert held_by(os.getpid()) < 1 << 20


@pytest.mark.parametrize("cell", [each for each in CELLS if each.outcome == "renewed"], ids=str)
def test_a_fault_costs_one_call(
    cell: Cell, bystander: Gang, request: pytest.FixtureRequest,
    tall: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with opened(cell, request) as gang:
        pids, words = victim(cell, gang)

        def cause() -> None:
            for pid in pids:
                kill(pid)

        outcome = strike(cell, gang.session, gang.lib, cause, tall, monkeypatch)
        if cell.moment == "in a call":
            gang.renewed(str(cell), outcome, *words)
            return
        assert outcome.error is None, repr(outcome.error)
        if cell.moment == "fetching":
            assert np.array_equal(outcome.result, tall)
        if cell.moment == "sending":
            assert np.array_equal(outcome.result.fetch(), tall)
        gang.goes_on(str(cell), outcome.seconds)


@pytest.mark.parametrize("cell", [each for each in CELLS if each.outcome == "goes on"], ids=str)
def test_a_gang_goes_on(cell: Cell, bystander: Gang, tall: Any, monkeypatch: Any) -> None:
    gang = Recovering()
    before = gang.ranks
    lib = gang.als.load_library("breaking", LIBRARY)
    A = gang.als.send_matrix(X, name="A")
    B = gang.als.load_library("linalg").matmul(A, A.T)
    pids, _ = victim(cell, gang)
    number = signal.SIGTERM if cell.how == "SIGTERM" else signal.SIGKILL
    begin = traces.clock()
    if cell.moment == "idle":
        gang.back_s(lambda: gang.kill(*pids, number=number))
    else:
        cause = lambda: gang.kill(*pids, number=number)  # noqa: E731
        error = strike(cell, gang.als, lib, cause, tall, monkeypatch).error
        assert isinstance(error, GroupRecoveredError), repr(error)
    seconds = traces.clock() - begin
    assert not set(gang.ranks) & set(before)
    assert gang.losses == 1
    assert seconds < BACK_LIMIT_S
    np.testing.assert_array_equal(A.fetch(), X)
    np.testing.assert_allclose(B.fetch(), X @ X.T)
    np.testing.assert_array_equal(gang.als.matrix("A").fetch(), X)
    C = gang.als.send_matrix(X)
    assert C.id > B.id
    np.testing.assert_allclose((C + A).fetch(), 2 * X)
    record(str(cell), seconds, None, "-")
    gang.als.close()


def test_marks_name_cells_of_the_table() -> None:
    assert unknown([*CELLS, *marked()]) == []
