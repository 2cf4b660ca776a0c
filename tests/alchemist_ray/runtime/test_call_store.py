"""The store of submitted calls: its limits, times to live, and the leases of matrices."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import pytest

from alchemist_ray.runtime.commands import call_store
from alchemist_ray.runtime.commands.call_store import CallStore
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.commands.jobs import Job
from alchemist_ray.runtime.commands.matrix_records import Record
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body, Kind
from tests.alchemist_ray.runtime.owners import Owner


class Asking:
    """A process that asks; its answers."""

    transport: asyncio.Transport | None = None

    def __init__(self) -> None:
        self.answers: list[Body] = []

    def send(self, kind: Kind, body: Body) -> None:
        assert kind is Kind.REPLY
        self.answers.append(body)


class Store:
    """A store, and the jobs that it has queued, which a test answers in place of the ranks."""

    def __init__(self, *, detached: bool = True) -> None:
        self.commands = Dispatcher(Owner()).commands
        self.jobs: list[Job] = []
        self.asking = Asking()
        self.store = CallStore(self.commands, self.jobs.append, self._end, detached=detached)

    def _end(self, job: Job, why: str) -> None:
        job.answer(Failure("CancelledError", why))

    def ask(self, op: str, **fields: Any) -> Any:
        """The answer to a command; None before it is answered. Raises `Failure`."""
        before = len(self.asking.answers)
        job = Job({"op": op, **fields}, "ben", self.asking, 1, "ben@lab (pid 7)")
        getattr(self.store, op)(job)
        told = self.asking.answers[before:]
        if told and "error" in told[0]:
            raise Failure.from_map(told[0]["error"])
        return told[0]["result"] if told else None

    def submit(self, matrices: Any = (), keep_s: float = 60.0, **fields: Any) -> str:
        ident = uuid.uuid4().hex
        command = {"op": "run", "task": {"name": "shot"}, "uses": list(matrices), **fields}
        self.ask("submit", call=ident, command=command, keep_s=keep_s)
        return ident

    def matrix(self, number: int, holder: str) -> None:
        found = Record(number, f"matrix{number}", (2, 2), "float64", "VC_STAR", holders={holder})
        self.commands.matrices[number] = found


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        async def limited() -> None:
            await asyncio.wait_for(test(), 30)

        asyncio.run(limited())

    return run


@in_loop
async def test_a_call_that_is_sent_again_is_queued_once() -> None:
    store = Store()
    command = {"op": "run", "task": {"name": "shot"}, "uses": []}
    for _ in range(2):
        assert store.ask("submit", call="1", command=command, keep_s=1.0) == {}
    assert len(store.jobs) == 1


@in_loop
async def test_it_refuses_beyond_its_limit_and_drops_nothing() -> None:
    store = Store()
    idents = [store.submit(given=b"." * (8 << 20)) for _ in range(31)]
    with pytest.raises(Failure, match=r"limit of 268.4 MB: forget\(\) those") as refused:
        store.submit(given=b"." * (8 << 20))
    assert refused.value.kind == "ResourceError"
    assert len(store.jobs) == len(idents)
    for job in store.jobs:
        job.answer({"value": {"parts": [b"result"]}, "matrices": []})
    assert all(store.ask("call_result", call=ident)["value"] for ident in idents)
    store.submit(given=b"." * (8 << 20))  # commands of calls that are over take no room


@in_loop
async def test_results_take_room_until_they_are_forgotten() -> None:
    store = Store()
    ident = store.submit()
    store.jobs[0].answer({"value": {"parts": [b"." * (200 << 20)]}, "matrices": []})
    with pytest.raises(Failure, match="would exceed the limit"):
        store.submit(given=b"." * (60 << 20))
    store.ask("forget_call", call=ident)
    store.submit(given=b"." * (60 << 20))
    with pytest.raises(Failure, match=f"no submitted call {ident}: it was forgotten"):
        store.ask("call_result", call=ident)


@in_loop
async def test_a_result_for_which_there_is_no_room_is_an_error_of_its_call() -> None:
    store = Store()
    first, second = store.submit(), store.submit()
    store.matrix(1, second)
    for job in store.jobs:
        job.answer({"value": {"parts": [b"." * (150 << 20)]}, "matrices": []})
    assert store.ask("call_result", call=first)["value"]
    with pytest.raises(Failure, match=r"the result of shot has 157.\d MB, which exceeds the limit"):
        store.ask("call_result", call=second)
    assert not store.commands.matrices
    assert store.store.ended() == {"ben@lab": {"done": 1, "failed": 1}}


@in_loop
async def test_a_result_and_its_matrices_end_with_their_time_to_live() -> None:
    store = Store()
    ident = store.submit(keep_s=0.05)
    store.matrix(1, ident)
    store.jobs[0].answer({"value": {"parts": [b""]}, "matrices": [{"matrix": 1}]})
    assert store.ask("submitted")["calls"][0]["state"] == "done"
    assert 1 in store.commands.matrices
    while store.ask("submitted")["calls"]:
        await asyncio.sleep(0.01)
    assert not store.commands.matrices


@in_loop
async def test_a_call_leases_its_arguments_until_it_is_over_and_its_results_longer() -> None:
    store = Store()
    store.matrix(1, "ben")
    ident = store.submit([1])
    store.commands.lost("ben")  # the program that has submitted it is gone
    assert 1 in store.commands.matrices
    store.matrix(2, ident)  # made by the call
    store.jobs[0].answer({"value": {"parts": [b""]}, "matrices": [{"matrix": 2}]})
    assert list(store.commands.matrices) == [2]
    store.ask("call_result", call=ident)
    store.ask("forget_call", call=ident)
    assert store.commands.matrices[2].holders == {"ben"}  # who has read the result


@in_loop
async def test_the_last_part_of_its_output_is_kept() -> None:
    store = Store()
    ident = store.submit()
    store.jobs[0].show(fraction=0.25, text="step 1")
    for number in range(20_000):
        store.jobs[0].show_output([(0, "stdout", f"line {number}")])
    told = store.ask("call_state", call=ident)
    assert told["progress"] == [0.25, "step 1"]
    assert told["output"][0] == call_store.CUT
    assert told["output"][-1] == (0, "stdout", "line 19999")
    assert sum(len(text) + 1 for _, _, text in told["output"][1:]) <= call_store.OUTPUT_NBYTES
    store.jobs[0].show_output([(1, "stdout", "." * 1_000_000)])
    assert len(store.ask("call_state", call=ident)["output"][-1][2]) < 1_000_000


@in_loop
async def test_the_end_of_a_call_is_told_to_those_who_wait_for_it() -> None:
    store = Store()
    first, second = store.submit(), store.submit()
    assert store.ask("submitted", running=[first, second]) is None
    store.jobs[1].answer({"value": {"parts": [b""]}, "matrices": []})
    news = store.asking.answers[-1]["result"]
    assert {about["id"]: about["state"] for about in news["calls"]} == {
        first: "queued",
        second: "done",
    }
    with pytest.raises(Failure, match=f"call {first} is not over yet"):
        store.ask("call_result", call=first)
    with pytest.raises(Failure, match=r"cancel\(\) it first"):
        store.ask("forget_call", call=first)
    assert store.ask("cancel_call", call=first) == store.ask("cancel_call", call=second) == {}
    calls = store.ask("submitted")["calls"]
    assert [about["state"] for about in calls] == ["cancelled", "done"]
    third = store.submit()
    for over in (first, second, "forgotten"):
        assert store.ask("submitted", running=[third, over]) is not None
    assert store.ask("submitted", running=[third]) is None


@in_loop
async def test_what_cannot_be_submitted_is_refused() -> None:
    with pytest.raises(Failure, match=r"lifetime='detached'") as refused:
        Store(detached=False).submit()
    assert refused.value.kind == "SessionError"
    store, free = Store(), {"op": "free", "matrices": [1]}
    with pytest.raises(Failure, match="only calls of routines and functions"):
        store.ask("submit", call="1", command=free, keep_s=1.0)
    with pytest.raises(Failure, match="it needs uses"):
        store.ask("submit", call="1", command={"op": "run", "task": {}}, keep_s=1.0)
    for keep_s in (0.0, float("nan"), float("inf"), "long"):
        with pytest.raises(Failure, match="keep_s"):
            store.submit(keep_s=keep_s)  # type: ignore[arg-type]
    assert not store.jobs
