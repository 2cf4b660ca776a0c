"""A call waits for a field of a call in another gang, and something ends either: the time it takes.

In each test one side waits in `receive`, in all ranks. Its gang goes on, and so does the other one,
unless it is lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ali
from alchemist_ray import AlchemistSession, couple
from alchemist_ray.errors import (
    CallTimeoutError,
    ChannelError,
    GroupFailedError,
    GroupRecoveredError,
    RoutineError,
)
from tests.faults.conftest import ERROR_LIMIT_S, Call, Gang, kill, needs_hosts, record
from tests.faults.hosts import Hosts
from tests.support import traces

INSIDE = "tests.faults.inside"
LINK_S = 10.0  # a cut link is noticed within


def waits(comm: Any) -> None:
    """Meet, say so to a program, and wait for a field that never comes."""
    ctx = ali.context()
    channel = ctx.channel("interface")
    ctx.show("met", ctx.zeros((1,), "float64"))
    channel.receive()


def meets(comm: Any, then: str) -> None:
    """Meet, and go on until the other side waits; then end in this way."""
    ctx = ali.context()
    ctx.channel("interface")
    ctx.show("met", ctx.zeros((1,), "float64"))
    if then == "returns":
        time.sleep(0.5)
        return
    if then == "raises" and ctx.rank == 1:
        time.sleep(0.5)
        raise ValueError("no convergence")
    while True:
        ctx.check()
        time.sleep(0.01)


@pytest.fixture
def other(gang: Gang) -> Iterator[AlchemistSession]:
    """A gang of 2 ranks, coupled with that of 3 ranks."""
    with AlchemistSession(2, name="coupled") as als:  # with a GroupManager of its own
        couple(gang.session, als)
        yield als


def met(*sessions: AlchemistSession) -> None:
    """Wait until the calls of the sessions have met."""
    for als in sessions:
        assert traces.wait_until(lambda als=als: als.watch("met").latest() is not None, 20)


def both_go_on(gang: Gang, other: AlchemistSession) -> None:
    """Both exchange a field again."""

    def exchange(comm: Any) -> Any:
        ctx = ali.context()
        channel, A = ctx.channel("interface"), ctx.zeros((3,), "float64")
        channel.send(A)
        return comm.allreduce(float(channel.receive().local.sum()))

    gang.session.run(lambda comm: None)  # after the call that is ending
    call = Call(lambda: other.run(exchange, timeout_s=20.0))
    assert gang.session.run(exchange, timeout_s=20.0) == 0.0
    assert call.outcome(0).result == 0.0


@pytest.mark.parametrize("then", ["returns", "raises"])
def test_the_other_call_ends(gang: Gang, other: AlchemistSession, then: str) -> None:
    ends = Call(lambda: other.run(meets, then))
    waiting = Call(lambda: gang.session.run(waits))
    ended = ends.outcome(0)
    outcome = waiting.outcome(ends._ended)
    assert isinstance(outcome.error, ChannelError), repr(outcome.error)
    words = "its call has returned" if then == "returns" else "failed: ValueError: no convergence"
    assert f"channel 'interface' to gang {other.connection.address.gang}" in str(outcome.error)
    assert words in str(outcome.error)
    assert (then == "raises") == isinstance(ended.error, RoutineError), repr(ended.error)
    assert outcome.seconds < ERROR_LIMIT_S
    record(f"channel: the other call {then}", outcome.seconds, None, outcome.error)
    both_go_on(gang, other)


@pytest.mark.parametrize("victim", ["rank", "proxy"])
def test_the_other_gang_is_lost(gang: Gang, other: AlchemistSession, victim: str) -> None:
    pid = other.list_workers()[1].pid
    lost = Call(lambda: other.run(meets, "waits"))
    waiting = Call(lambda: gang.session.run(waits))
    met(gang.session, other)
    when = traces.clock()
    kill(pid if victim == "rank" else traces.parent_of(pid))
    outcome = waiting.outcome(when)
    error = lost.outcome(when).error
    kind = GroupRecoveredError if victim == "rank" else GroupFailedError
    assert isinstance(error, kind), repr(error)
    assert isinstance(outcome.error, ChannelError), repr(outcome.error)
    assert "it was lost in its call: a rank was killed" in str(outcome.error)
    assert outcome.seconds < ERROR_LIMIT_S
    record(f"channel: the other gang's {victim} is killed", outcome.seconds, None, outcome.error)
    if victim == "rank":
        both_go_on(gang, other)


@pytest.mark.parametrize("how", ["Ctrl-C", "timeout_s"])
@pytest.mark.parametrize("moment", ["meeting", "receiving"])
def test_the_wait_is_ended(gang: Gang, other: AlchemistSession, how: str, moment: str) -> None:
    ends: Call | None = None
    if moment == "receiving":
        ends = Call(lambda: other.run(meets, "waits"))
    when = [0.0]

    def interrupt() -> None:
        if moment == "receiving":
            met(gang.session)
        else:
            time.sleep(0.5)
        when[0] = traces.clock()
        os.kill(os.getpid(), signal.SIGINT)

    limit_s = 1.5 if how == "timeout_s" else None
    begun = traces.clock()
    interrupting = threading.Thread(target=interrupt)
    if limit_s is None:
        interrupting.start()
    with pytest.raises((KeyboardInterrupt, CallTimeoutError)) as caught:
        gang.session.run(waits, timeout_s=limit_s)
    seconds = traces.clock() - when[0]
    if limit_s is not None:
        seconds = traces.clock() - begun - limit_s
    assert isinstance(caught.value, CallTimeoutError if limit_s else KeyboardInterrupt)
    assert seconds < ERROR_LIMIT_S
    record(f"channel: {how} while {moment}", seconds, None, caught.value)
    if ends is not None:
        other.cancel()
        assert ends.outcome(0).error is not None
    both_go_on(gang, other)


@pytest.mark.parametrize("victim", ["rank", "proxy"])
def test_the_other_gang_is_lost_before_it_has_come(
    gang: Gang, other: AlchemistSession, victim: str
) -> None:
    """A rank costs nothing: its gang goes on, and may come later."""
    pid = other.list_workers()[1].pid
    waiting = Call(lambda: gang.session.run(waits))
    time.sleep(0.5)
    when = traces.clock()
    kill(pid if victim == "rank" else traces.parent_of(pid))
    if victim == "rank":
        assert traces.wait_until(lambda: pid not in [w.pid for w in other.list_workers()], 10)
        with pytest.raises(RoutineError):
            other.run(meets, "raises")
        assert "no convergence" in str(waiting.outcome(when).error)
        return
    outcome = waiting.outcome(when)
    assert isinstance(outcome.error, ChannelError), repr(outcome.error)
    assert outcome.seconds < ERROR_LIMIT_S
    record("channel: the other gang is lost before it meets", outcome.seconds, None, outcome.error)


# --- between hosts ---


def on_hosts(test: Callable[..., None]) -> Any:
    for mark in needs_hosts(150):
        test = mark(test)
    return test


@on_hosts
def test_the_link_is_cut() -> None:
    with Hosts(2) as hosts:
        hosts.start_ray([2, 2])
        near = hosts[0]
        assert near.call(f"{INSIDE}:join", 2, limit_s=40) == 2
        workers = [near.call(f"{INSIDE}:request", name, 2, limit_s=60) for name in ("one", "two")]
        assert {w["host"] for its in workers for w in its} == {hosts[0].name, hosts[1].name}
        assert near.call(f"{INSIDE}:exchanged", "one", "two", limit_s=40)
        near.begin(f"{INSIDE}:exchanges_until_lost", "one", "two")
        time.sleep(2.0)
        start = traces.clock()
        hosts[1].cut()
        ended = near.result(LINK_S + 20)
        kinds = {kind for kind, _, _ in ended}
        assert kinds == {"ChannelError", "GroupFailedError"}, ended
        (seconds,) = (at - start for kind, _, at in ended if kind == "ChannelError")
        assert seconds < LINK_S
        record("channel, 2 hosts: the link is cut", seconds, None, "ChannelError")
