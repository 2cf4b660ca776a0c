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
from alchemist_ray.runtime.gang import Gang
from mpi_workers.matrix.available_memory import KEEPER_OOM_SCORE, set_oom_score
from mpi_workers.wire.frames import Body

STARTS = ("launch", "function", "own_gang", "expect_launch")  # methods that begin a gang


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
        self._gangs: dict[str, Gang] = {}
        # Threads wait for objects, which Ray takes for the event loop: it would tell the user.
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
        exporter.start()

    def gang(self, name: str) -> Gang:
        """A gang; without ranks if it has not been started here."""
        return self._gangs.get(name) or Gang(name, self._ident or name)

    async def ask(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a gang; see `GangHandle`."""
        gang = self.gang(name)
        if method in STARTS:
            self._gangs[name] = gang
        return await getattr(gang, method)(*args, **kwargs)

    async def gangs(self, *, memory: bool = False) -> list[Body]:
        """The entries of all gangs in the catalogue; see `Gang.about`."""
        asked = (gang.about(memory=memory) for gang in self._gangs.values())
        return list(await asyncio.gather(*asked))

    async def forget(self, name: str) -> None:
        """End a gang at once, also one that is being started: its session is closed."""
        if name in self._gangs:
            await self._gangs.pop(name).drop()
