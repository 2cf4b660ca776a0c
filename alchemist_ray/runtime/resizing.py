"""Resizing: moves a gang to more or fewer ranks.

The next incarnation is started while commands run. Then, in its turn among the commands, it
receives the matrices and takes the place of the present one. If anything fails before, the present
one goes on as it was.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

from ray.exceptions import RayError

from alchemist_ray.errors import AlchemistError, GroupError, GroupFailedError, from_failure
from alchemist_ray.gang.address import GangAddress, next_token
from alchemist_ray.runtime.dispatcher import Dispatcher
from alchemist_ray.runtime.gang_cpus import GangCpus
from alchemist_ray.runtime.incarnation import Incarnation
from alchemist_ray.runtime.incarnation_copy import IncarnationCopy
from mpi_workers.failures import Failure

# What the loss of ranks means for a gang, but not for one that goes on with others.
ENDED = re.compile(r"[.,] (so )?the gang was ended.*", re.IGNORECASE | re.DOTALL)


class Resizing:
    """The resizes of one gang, one at a time.

    Parameters
    ----------
    dispatcher : Dispatcher
    cpus : GangCpus
    use : callable(new, address)
        Lets an incarnation take the place of the present one. Raises if its ranks are lost.

    Attributes
    ----------
    next : Incarnation or None
        It is being started, or receives matrices.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        cpus: GangCpus,
        use: Callable[[Incarnation, GangAddress], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._cpus = cpus
        self._use = use
        self.next: Incarnation | None = None
        self._task: asyncio.Task[None] | None = None
        self._moving: asyncio.Task[None] | None = None
        self._moved = False  # whether the new ranks have taken the place of the old ones
        self._stopped: AlchemistError | None = None  # why

    @property
    def moving(self) -> bool:
        """Whether matrices are being moved, so that commands wait."""
        return self._moving is not None and not self._moving.done()

    async def moved(self) -> None:
        """Wait while matrices are being moved."""
        if self._moving is not None:
            await asyncio.wait([self._moving])

    async def run(self, old: Incarnation, new: Incarnation, address: GangAddress) -> None:
        """Move from one incarnation, at `address`, to one that is started now.

        Raises
        ------
        AlchemistError
            The gang goes on as it was.
        """
        self._stopped, self._moved = None, False
        self._task = asyncio.get_running_loop().create_task(self._run(old, new, address))
        reason: Exception
        try:
            await self._task
            return
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            reason = self._stopped
        except Failure as failure:
            reason = from_failure(failure)
        except (AlchemistError, RayError, OSError) as error:
            reason = error
        if not self._moved:  # else it came too late
            raise _unchanged(reason, old.request.workers) from None

    def stop(self, why: AlchemistError) -> None:
        """End the resize that is under way, unless the new ranks have taken the place already."""
        if self._task is not None and not self._moved:
            self._stopped = self._stopped or why
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until no resize is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, old: Incarnation, new: Incarnation, address: GangAddress) -> None:
        self.next = new
        request = new.request
        try:
            # Not in `start`: if there are too few, none is started.
            await self._cpus.reserve(request.workers, request.options.start_timeout_s)
            target = await new.start(self._cpus, address.first_epoch, next_token(address.token))
            copy = IncarnationCopy(self._dispatcher.commands, old, new, address, target)
            await copy.prepare()
            await self._in_turn(copy, new, target)
        finally:
            self.next = None
            if self._moved:
                await _completed(self._end(old, request.workers))
            else:
                await _completed(self._end(new, old.request.workers))

    async def _in_turn(self, copy: IncarnationCopy, new: Incarnation, address: GangAddress) -> None:
        """Move all that the gang has; no command runs meanwhile."""

        async def move() -> None:
            await copy.run()
            self._use(new, address)
            self._moved = True

        async def in_turn() -> None:
            self._moving = asyncio.get_running_loop().create_task(move())
            await asyncio.wait([self._moving])
            if self._moving.cancelled():
                raise Failure("CancelledError", "it was cancelled")
            self._moving.result()

        commands, self._moving = self._dispatcher.commands, None
        commands.own["resize"] = in_turn
        try:
            body = {"op": "resize", "matrices": commands.matrices}
            await self._dispatcher.submit(body, internal=True)
        finally:
            del commands.own["resize"]
            if self._moving is not None:
                self._moving.cancel()
                await asyncio.wait([self._moving])

    async def _end(self, incarnation: Incarnation, workers: int) -> None:
        """End one of two incarnations; the other one has this many ranks."""
        await incarnation.shutdown()
        await incarnation.release()
        await self._cpus.keep(workers)


def _unchanged(error: Exception, workers: int) -> AlchemistError:
    """The error for a user whose gang goes on as it was."""
    known = error if isinstance(error, AlchemistError) else GroupError(str(error))
    kind = GroupError if isinstance(known, GroupFailedError) else type(known)
    reason = ENDED.sub("", str(known.args[0]))
    return kind(
        f"the gang was not resized and goes on with its {workers} workers: {reason}", **known.facts
    )


async def _completed(work: Coroutine[Any, Any, None]) -> None:
    """Await work that is not left half done if this task is cancelled."""
    task, cancelled = asyncio.get_running_loop().create_task(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
