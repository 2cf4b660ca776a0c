"""GangSlot: a place in a GroupManager for one gang at a time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray

from alchemist_ray.attached.address import GangAddress
from alchemist_ray.attached.states import GangState
from alchemist_ray.background import in_pool
from alchemist_ray.cluster.actors import find_gang
from alchemist_ray.cluster.driver import end_own_driver
from alchemist_ray.errors import AlchemistError, GroupError, GroupFailedError, advising
from alchemist_ray.functions import user_code
from alchemist_ray.runtime.gang import Gang
from alchemist_ray.runtime.launch.gang_request import GangRequest
from mpi_workers.wire.frames import Body

EXPECTED_S = 30.0


class GangSlot:
    """The gangs of one name, one after another: a session may start a gang where one has ended.

    Parameters
    ----------
    name, ident : str
        See `Gang`.
    """

    def __init__(self, name: str, ident: str) -> None:
        self._name = name
        self._ident = ident
        self._last: Gang | None = None
        self._dropped = False
        self._one_by_one = asyncio.Lock()

    @property
    def gang(self) -> Gang | None:
        """The gang that has been started here, unless it has ended."""
        if self._last is None or self._last.state is GangState.NONE:
            return None
        return self._last

    async def launch(self, request: GangRequest) -> GangAddress:
        """Start a gang and wait until all its ranks have checked in.

        Raises
        ------
        ResourceError, LaunchError
            In time; nothing of the gang is left then.
        GroupError
            If the gang is there or starts already.
        """
        if self.gang is not None and self.gang.state is GangState.FAILED:
            await self.gang.end("the session has started another gang")
        if self._dropped:
            raise GroupFailedError(f"gang {self._name} was ended before the call had its turn")
        if self.gang is not None:
            raise GroupError(f"gang {self._name} {self.gang.state.words}")
        before = 0 if self._last is None else self._last.epoch
        epoch = max(before, request.after) + 1
        self._last = Gang(self._name, self._ident, request, epoch, self._leave)
        return await self._last.launch()

    async def own_gang(self, request: GangRequest) -> GangAddress:
        """The gang that is there, or one that is started now: `function` for a connection."""
        async with self._one_by_one:
            return await self._there(request)

    async def _there(self, request: GangRequest) -> GangAddress:
        """The gang that is there, or one that is started now, also if the caller goes away."""
        if self.gang is not None:
            with contextlib.suppress(AlchemistError):
                return await self.gang.gang_address()
        return await self.launch(request)

    async def function(self, request: GangRequest, body: Body, *values: Any) -> Any:
        """Run the function of a command on a gang of its own, which is started if necessary.

        One after the other, in the order of the calls. `values` are what its object refs
        stood for. Raises `AlchemistError`.
        """
        task = body["task"]
        async with self._one_by_one:
            epoch = (await self._there(request)).epoch
            if values:
                task["values"] = await in_pool(user_code.packed_values, values)
            assert self._last is not None
            try:
                reply = await self._last.command(epoch, body)
                if known := [record["matrix"] for record in reply["matrices"]]:
                    await self._last.command(epoch, {"op": "free", "matrices": known})
                    raise user_code.no_matrix(task["name"])
                return await in_pool(user_code.result_of, reply, dict)
            except GroupFailedError as error:
                raise advising(error, "the next call starts a new one") from None

    async def drop(self) -> None:
        """End the gang at once, also if it is being started; no other one is started."""
        self._dropped = True  # calls of `function` may wait for their turn
        if self.gang is not None:
            await self.gang.drop()

    async def expect_launch(self) -> None:
        """End this actor if the process that made it has died before it could ask for a gang."""
        await asyncio.sleep(EXPECTED_S)
        if self.gang is None:
            self._exit()

    def _leave(self, gang: Gang) -> None:
        """End the actor of a detached gang, unless another one has been started."""
        if gang is self._last:
            self._exit()

    def _exit(self) -> None:
        end_own_driver(self._name)
        # Not `ray.actor.exit_actor`: it waits for all calls that the actor is serving.
        ray.kill(find_gang(self._name).actor)
