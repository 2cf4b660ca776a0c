"""The life of a gang: its state, and the one task that does the work of each state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from alchemist_ray.attached.states import GangState

log = logging.getLogger(__name__)

# What follows if the work of a state ends, or fails, without having entered another one.
AFTER = {
    GangState.STARTING: GangState.NONE,
    GangState.RECOVERING: GangState.FAILED,
    GangState.ENDING: GangState.NONE,
}


class Life:
    """From a launch to the end, again and again.

    `enter` only names the next state: the task does its work. The work of a state has ended, or
    was cancelled, before that of the next state begins. So the works of two states never run at
    the same time, and each state is followed by another one.

    Parameters
    ----------
    name : str
        Of the gang, for messages.
    work : mapping of GangState to function
        A coroutine of a state. It enters the next state when it has nothing left to wait for.

    Attributes
    ----------
    state : GangState
        Changed by `enter` alone.
    """

    def __init__(
        self, name: str, work: Mapping[GangState, Callable[[], Coroutine[Any, Any, None]]]
    ) -> None:
        self._name = name
        self._work = work
        self.state = GangState.NONE
        self._over = asyncio.Event()  # of the present state: set when another one is entered
        self._task: asyncio.Task[None] | None = None

    def enter(self, state: GangState) -> None:
        """Go to a state. From NONE the task begins; it ends there."""
        if state is self.state:
            return
        if state not in self.state.next:
            raise RuntimeError(f"gang {self._name} cannot go from state {self.state} to {state}")
        begins = self.state is GangState.NONE
        self.state = state
        over, self._over = self._over, asyncio.Event()
        over.set()
        if begins:
            self._task = asyncio.get_running_loop().create_task(self._live())

    async def leaves(self, *states: GangState) -> None:
        """Wait while the gang is in one of these states."""
        while self.state in states:
            await self._over.wait()

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            state = self.state
            over = self._over
            leaving = loop.create_task(over.wait())
            if state in self._work:
                work = loop.create_task(self._work[state]())
                await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
                work.cancel()
                await asyncio.wait({work})
                if not work.cancelled() and (error := work.exception()) is not None:
                    log.error("gang %s while %s", self._name, state, exc_info=error)
                if not over.is_set() and state in AFTER:
                    self.enter(AFTER[state])
                    if self.state is GangState.NONE:
                        return  # at once: a launch that waits for this begins another task
            await leaving
