"""The GroupManager: the actor that reserves, launches, watches and ends gangs.

The private gangs of a process share one (`manager_pool`), because an actor takes 0.5 s of CPU to
start. It belongs to that process, so Ray ends it when the user's program dies; the gangs' proxies
notice at once and leave nothing behind. A gang with a name has a GroupManager of its own. That of
a detached gang belongs to the cluster, and ends itself when its gang has ended.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from alchemist_ray.measures import exporter
from alchemist_ray.runtime.gang import Gang, no_workers
from alchemist_ray.runtime.gang_slot import GangSlot
from mpi_workers.matrix.available_memory import KEEPER_OOM_SCORE, set_oom_score
from mpi_workers.wire.frames import Body

STARTS = ("launch", "function", "own_gang", "expect_launch")  # methods of `GangSlot`
# The results of methods that have nothing to do where a gang has ended, or was not started.
WITHOUT_GANG = {"cancel": 0} | dict.fromkeys(
    ("end", "end_results", "holding", "kill", "stop_resize")
)


class GroupManager:
    """Actor: see the module. All its state is on one event loop.

    Parameters
    ----------
    ident : str, optional
        Begins the names of the processes and folders of a gang with a name. Those of a private
        gang begin with its id.
    """

    def __init__(self, ident: str = "") -> None:
        set_oom_score(KEEPER_OOM_SCORE)
        self._ident = ident
        self._slots: dict[str, GangSlot] = {}  # by the name or id of the gang
        # Threads wait for objects, which Ray takes for the event loop: it would tell the user.
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
        exporter.start()

    def gang(self, name: str) -> Gang | None:
        """A gang that has been started here and has not ended."""
        slot = self._slots.get(name)
        return None if slot is None else slot.gang

    async def ask(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of `GangSlot` or of its gang; see `GangHandle`.

        Raises `SessionError` if the method needs a gang that has not been started here.
        """
        if method in STARTS:
            slot = self._slots.setdefault(name, GangSlot(name, self._ident or name))
            return await getattr(slot, method)(*args, **kwargs)
        if (gang := self.gang(name)) is not None:
            return await getattr(gang, method)(*args, **kwargs)
        if method in WITHOUT_GANG:
            return WITHOUT_GANG[method]
        raise no_workers(name)

    async def gangs(self, *, memory: bool = False) -> list[Body]:
        """The entries of all gangs in the catalogue; see `Gang.about`."""
        gangs = filter(None, map(self.gang, self._slots))
        return list(await asyncio.gather(*(gang.about(memory=memory) for gang in gangs)))

    async def forget(self, name: str) -> None:
        """End a gang at once, also one that is being started: its session is closed."""
        if name in self._slots:
            await self._slots.pop(name).drop()
