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
from alchemist_ray.transfer.fetching import FAILURE_NEWS_S
from alchemist_ray.transfer.object_store import ObjectStoreSource
from alchemist_ray.transfer.sources import NumPySource
from tests.faults.conftest import (
    ERROR_LIMIT_S,
    Call,
    Gang,
    Outcome,
    agent_pids,
    inject_during,
    kill,
    pid_of,
    record,
)

pytestmark = pytest.mark.timeout(60, func_only=True)

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
                when.append(time.monotonic())
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


@pytest.mark.cell("rank", "fetching", "private", "lost")
def test_a_stopped_rank_killed_while_a_fetch_waits_for_it(gang: Gang) -> None:
    kill(gang.ranks[0], signal.SIGSTOP)
    outcome = inject_during(lambda: kill(gang.ranks[0]), gang.A.fetch)
    gang.lost("kill -9 of a stopped rank that a fetch waits for", outcome, "rank 0", "SIGKILL")


@pytest.mark.cell("rank", "sending", "private", "lost")
def test_a_stopped_rank_killed_while_a_send_waits_for_it(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is stopped when the matrix exists and its memory is not yet mapped."""
    send = NumPySource.send

    def stopping(self: NumPySource, *args: Any) -> Any:
        kill(gang.ranks[1], signal.SIGSTOP)
        return send(self, *args)

    monkeypatch.setattr(NumPySource, "send", stopping)
    outcome = inject_during(
        lambda: kill(gang.ranks[1]), lambda: gang.session.send_matrix(np.ones((9, 9)))
    )
    monkeypatch.undo()
    gang.lost("kill -9 of a stopped rank that a send waits for", outcome, "rank 1", "SIGKILL")


def blocks(n: int, rows: int = 20_000) -> list[Any]:
    return [(ray.put(np.full((rows, 20), float(i))), i * rows, 0) for i in range(n)]


@pytest.mark.cell("rank", "sending", "private", "lost")
@pytest.mark.parametrize("sender", ["this process", "the agent"])
def test_a_rank_killed_while_it_is_sent_blocks(
    gang: Gang, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, sender: str
) -> None:
    if sender == "the agent":
        request.getfixturevalue("by_agents")
    send = ObjectStoreSource.send

    def stopping(self: ObjectStoreSource, *args: Any) -> Any:
        kill(gang.ranks[1], signal.SIGSTOP)
        return send(self, *args)

    monkeypatch.setattr(ObjectStoreSource, "send", stopping)
    pieces = blocks(4)
    outcome = inject_during(lambda: kill(gang.ranks[1]), lambda: gang.session.send_matrix(pieces))
    monkeypatch.undo()
    gang.lost(f"kill -9 of a rank while {sender} sends it blocks", outcome, "rank 1", "SIGKILL")


@pytest.mark.cell("agent", "sending", "private", "TransferError")
def test_an_agent_killed_while_it_sends_blocks_breaks_the_transfer_alone(
    gang: Gang, monkeypatch: pytest.MonkeyPatch, by_agents: None
) -> None:
    send = ObjectStoreSource.send

    def stopping(self: ObjectStoreSource, *args: Any) -> Any:
        kill(gang.ranks[1], signal.SIGSTOP)  # so that the agent waits in the middle
        return send(self, *args)

    monkeypatch.setattr(ObjectStoreSource, "send", stopping)
    pieces = blocks(4)
    known = len(gang.session.list_matrices())

    def cause() -> None:
        gang.kill_agent()
        kill(gang.ranks[1], signal.SIGCONT)

    outcome = inject_during(cause, lambda: gang.session.send_matrix(pieces))
    monkeypatch.undo()
    assert isinstance(outcome.error, TransferError), repr(outcome.error)
    assert "could not read or send" in str(outcome.error)
    assert (
        outcome.seconds < ERROR_LIMIT_S + FAILURE_NEWS_S
    )  # between two checks whether the gang is lost
    record("kill -9 of the agent while it sends blocks", outcome.seconds, None, outcome.error)
    assert len(gang.session.list_matrices()) == known
    assert gang.works()
    B = gang.session.send_matrix(pieces)
    assert np.array_equal(B.fetch()[::20_000, 0], np.arange(4.0))
    B.free()


def test_an_agent_releases_a_gang_that_has_ended(gang: Gang, by_agents: None) -> None:
    """Memory of ranks stays allocated until every process that maps it releases it."""
    gang.session.yield_workers()
    gang.start()
    agent = agent_pids()["agent"]
    held = held_by(agent)
    gang.session.send_matrix(blocks(4))
    assert held_by(agent) - held > 10 << 20
    kill(pid_of(gang.manager))
    with pytest.raises(AlchemistError):
        gang.session.list_workers()
    deadline = time.monotonic() + ERROR_LIMIT_S
    while held_by(agent) > held and time.monotonic() < deadline:
        time.sleep(0.02)
    assert held_by(agent) <= held
    gang.again()


@pytest.mark.cell("rank", "fetching", "private", "lost")
def test_transfers_in_two_threads_both_fail_with_a_killed_rank(gang: Gang) -> None:
    kill(gang.ranks[1], signal.SIGSTOP)
    fetches = [Call(gang.A.fetch), Call(gang.A.fetch)]
    time.sleep(0.3)
    start = time.monotonic()
    threading.Timer(0.0, kill, (gang.ranks[1],)).start()
    outcome = [fetch.outcome(start) for fetch in fetches]
    for each in outcome:
        assert "rank 1" in str(each.error), repr(each.error)
    gang.lost("kill -9 of a rank, two fetches at once", max(outcome, key=lambda t: t.seconds))
