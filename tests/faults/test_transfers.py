"""A rank, an agent or the GroupManager is killed during a transfer."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray.errors import AlchemistError, TransferError
from alchemist_ray.transfer import fetching, sending
from alchemist_ray.transfer.object_store import STOP_TIMEOUT_S, BlockSender
from alchemist_ray.transfer.sources import NumPySource
from alchemist_ray.transfer.watching import FAILURE_NEWS_S
from tests.faults.conftest import (
    ERROR_LIMIT_S,
    MATRIX,
    Call,
    Gang,
    Outcome,
    agent_pids,
    inject_during,
    kill,
    pid_of,
    record,
)
from tests.support import traces

TALL = (400_000, 100)  # 320 MB: several panels of a transfer


@pytest.fixture(scope="module")
def tall() -> np.ndarray[Any, Any]:
    return np.ones(TALL)


def halfway(monkeypatch: pytest.MonkeyPatch, cause: Callable[[], Any]) -> list[float]:
    """Cause the fault when a part of the next transfer has moved; return the time of the fault."""
    when: list[float] = []

    @contextlib.contextmanager
    def bar(what: str, nbytes: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
        def moved(part: int) -> None:
            if not when and part < nbytes:
                when.append(traces.clock())
                cause()

        yield moved

    for module in (sending, fetching):
        monkeypatch.setattr(module, "transfer_bar", bar)
    return when


def outcome_of(call: Callable[[], Any], when: list[float]) -> Outcome:
    under = Call(call)
    outcome = under.outcome(0.0)
    assert when, "the transfer ended before the fault"
    outcome.seconds -= when[0]
    return outcome


def held_by(pid: int) -> int:
    """Bytes of ranks' memory that a process has mapped."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:alchemist" in line:
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            total += end - start
    return total


def blocks(n: int, rows: int = 20_000) -> list[Any]:
    return [(ray.put(np.full((rows, 20), float(i))), i * rows, 0) for i in range(n)]


@contextlib.contextmanager
def stopped_in_a_send(rank: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop a rank when the next matrix exists and its memory is not yet mapped."""

    def stopping(begin: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*args: Any) -> Any:
            kill(rank, signal.SIGSTOP)
            return begin(*args)

        return stopped

    with patch.context() as context:
        context.setattr(NumPySource, "send", stopping(NumPySource.send))
        context.setattr(BlockSender, "__enter__", stopping(BlockSender.__enter__))
        yield


@pytest.mark.cell("rank", "sending", "private", "renewed")
@pytest.mark.parametrize("sender", ["this process", "this process, blocks", "the agent, blocks"])
def test_a_stopped_rank_killed_while_a_send_waits_for_it(
    gang: Gang, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, sender: str
) -> None:
    if "agent" in sender:
        request.getfixturevalue("by_agents")
    data = blocks(4) if "blocks" in sender else np.ones((9, 9))
    with stopped_in_a_send(gang.ranks[1], monkeypatch):
        outcome = inject_during(lambda: kill(gang.ranks[1]), lambda: gang.session.send_matrix(data))
    assert outcome.error is None, outcome.error
    gang.goes_on(f"kill -9 of a stopped rank, sent by {sender}", outcome.seconds)


def chunks(n: int, rows: int = 20_000) -> Any:
    """A persisted Dask array."""
    da = pytest.importorskip("dask.array", reason="needs alchemist-on-ray[dask]")
    from ray.util.dask import ray_dask_get  # noqa: PLC0415

    x = (da.ones((n * rows, 20), chunks=(rows, 20)) + 1).persist(scheduler=ray_dask_get)
    refs = list(dict(x.__dask_graph__()).values())
    ray.wait(refs, num_returns=len(refs), timeout=30)
    return x


@pytest.mark.cell("agent", "sending", "private", "TransferError")
@pytest.mark.parametrize(("made", "wanted"), [(blocks, [0, 1, 2, 3]), (chunks, [2, 2, 2, 2])])
def test_an_agent_killed_while_it_sends_breaks_the_transfer_alone(
    gang: Gang, monkeypatch: pytest.MonkeyPatch, by_agents: None, made: Any, wanted: list[int]
) -> None:
    data, known = made(4), len(gang.session.list_matrices())

    def cause() -> None:
        gang.kill_agent()
        kill(gang.ranks[1], signal.SIGCONT)

    # So that the agent waits in the middle.
    with stopped_in_a_send(gang.ranks[1], monkeypatch):
        outcome = inject_during(cause, lambda: gang.session.send_matrix(data))
    assert isinstance(outcome.error, TransferError), repr(outcome.error)
    assert "could not read or send" in str(outcome.error)
    # Between two checks whether the gang is lost.
    assert outcome.seconds < ERROR_LIMIT_S + FAILURE_NEWS_S + STOP_TIMEOUT_S
    record("kill -9 of the agent while it sends blocks", outcome.seconds, None, outcome.error)
    assert len(gang.session.list_matrices()) == known
    assert gang.works()
    B = gang.session.send_matrix(data)
    assert np.array_equal(B.fetch()[::20_000, 0], wanted)
    B.free()


@pytest.mark.parametrize("made", [blocks, chunks])
def test_an_agent_releases_a_gang_that_has_ended(gang: Gang, by_agents: None, made: Any) -> None:
    """Memory of ranks stays allocated until every process that maps it releases it."""
    gang.session.yield_workers()
    gang.start()
    agent = agent_pids()["agent"]
    held = held_by(agent)
    gang.session.send_matrix(made(4))
    assert held_by(agent) - held > 10 << 20
    kill(pid_of(gang.manager))
    with pytest.raises(AlchemistError):
        gang.session.list_workers()
    assert traces.wait_until(lambda: held_by(agent) <= held, ERROR_LIMIT_S) is not None
    gang.again()


@pytest.mark.cell("rank", "fetching", "private", "renewed")
def test_transfers_in_two_threads_both_outlive_a_killed_rank(gang: Gang) -> None:
    kill(gang.ranks[1], signal.SIGSTOP)
    fetches = [Call(gang.A.fetch), Call(gang.A.fetch)]
    time.sleep(0.3)
    start = traces.clock()
    threading.Timer(0.0, kill, (gang.ranks[1],)).start()
    outcome = [fetch.outcome(start) for fetch in fetches]
    for each in outcome:
        assert np.array_equal(each.result, MATRIX), repr(each.error)
    seconds = max(each.seconds for each in outcome)
    gang.goes_on("kill -9 of a rank, two fetches at once", seconds)
