"""GangHandle: calls of a gang's GroupManager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from alchemist_ray.runtime.names import NAMESPACE, group_name


@dataclass(frozen=True, slots=True)
class GangHandle:
    """A gang in its GroupManager: ``handle.NAME.remote(...)`` calls a method of `ManagedGang`.

    Attributes
    ----------
    actor : actor handle
        The GroupManager, which may have other gangs.
    gang : str
    """

    actor: ActorHandle
    gang: str

    def __getattr__(self, name: str) -> GangMethod:
        if name.startswith("_"):  # protocols of Python, such as pickle's
            raise AttributeError(name)
        return GangMethod(self, name)


@dataclass(frozen=True, slots=True)
class GangMethod:
    """A method of a gang in its GroupManager."""

    _gang: GangHandle
    _name: str

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; returns an ObjectRef."""
        ask: Any = self._gang.actor.ask
        return ask.remote(self._gang.gang, self._name, *args, **kwargs)


def find_gang(gang: str) -> GangHandle:
    """A gang of this Ray cluster. Raises `ValueError` if its GroupManager is not there."""
    return GangHandle(ray.get_actor(group_name(gang), namespace=NAMESPACE), gang)
