"""The states of a gang, and the work of each, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray.attached.states import GangState
from alchemist_ray.runtime.life import AFTER, Life

EVENTS = st.lists(
    st.tuples(
        st.sampled_from([s for s in GangState if s is not GangState.NONE]), st.integers(0, 3)
    ),
    max_size=12,
)


@given(EVENTS, st.sets(st.sampled_from(list(AFTER))))
def test_works_never_meet_and_every_life_ends(
    events: list[tuple[GangState, int]], failing: set[GangState]
) -> None:
    """Whatever is asked for, in whatever turn of the loop, and whatever fails."""
    at_work: list[GangState] = []
    wrong: list[str] = []

    def of(state: GangState) -> Callable[[], Coroutine[Any, Any, None]]:
        async def work() -> None:
            if at_work:
                wrong.append(f"{state} while {at_work}")
            at_work.append(state)
            try:
                for _ in range(3):
                    await asyncio.sleep(0)
                if state in failing:
                    raise OSError("no room")
                if state in (GangState.STARTING, GangState.RECOVERING):
                    life.enter(GangState.READY)
            finally:
                try:
                    await asyncio.sleep(0)  # a clean-up takes its time, also in a cancelled task
                finally:
                    at_work.remove(state)

        return work

    async def launch_again() -> None:
        """As callers do that wait for the end of the gang before."""
        for _ in range(3):
            await life.leaves(*(set(GangState) - {GangState.NONE}))
            life.enter(GangState.STARTING)

    async def run() -> None:
        nonlocal life
        life = Life("g0", {state: of(state) for state in (*AFTER, GangState.FAILED)})
        life.enter(GangState.STARTING)
        again = asyncio.create_task(launch_again())
        for state, turns in events:
            for _ in range(turns):
                await asyncio.sleep(0)
            if state in life.state.next:
                life.enter(state)
        async with asyncio.timeout(5):
            while life.state is not GangState.NONE or not again.done():
                if life.state in (GangState.READY, GangState.RESIZING, GangState.FAILED):
                    life.enter(GangState.ENDING)
                await asyncio.sleep(0)
        assert not at_work
        assert wrong == []

    life: Life
    asyncio.run(run())


def test_the_work_of_a_state_that_is_left_is_cancelled_and_waited_for() -> None:
    steps: list[str] = []

    async def start() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            steps.append("start is clean")

    async def end() -> None:
        steps.append("end")

    async def run() -> None:
        life = Life("g0", {GangState.STARTING: start, GangState.ENDING: end})
        life.enter(GangState.STARTING)
        await asyncio.sleep(0)
        life.enter(GangState.ENDING)
        await asyncio.wait_for(life.leaves(GangState.ENDING), 5)
        assert life.state is GangState.NONE

    asyncio.run(run())
    assert steps == ["start is clean", "end"]


def test_work_that_fails_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def start() -> None:
        raise OSError("no room")

    async def run() -> None:
        life = Life("g0", {GangState.STARTING: start})
        life.enter(GangState.STARTING)
        await asyncio.wait_for(life.leaves(GangState.STARTING), 5)
        assert life.state is GangState.NONE

    asyncio.run(run())
    assert "gang g0 while starting" in caplog.text
    assert "no room" in caplog.text


def test_no_state_is_skipped() -> None:
    async def enter() -> None:
        with pytest.raises(RuntimeError, match="g0 cannot go from state none to ready"):
            Life("g0", {}).enter(GangState.READY)

    asyncio.run(enter())
    reached = {GangState.NONE}
    for _ in GangState:
        reached |= set().union(*(state.next for state in reached))
    assert reached == set(GangState)
    assert all(GangState.NONE in {*state.next, *(n for s in state.next for n in s.next)}
               for state in GangState if state.has_ranks)  # fmt: skip
