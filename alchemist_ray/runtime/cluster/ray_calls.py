"""Calls of our actors: `ray.get` that raises the package's errors, and the methods of a gang."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from alchemist_ray.errors import NEXT_GANG, AlchemistError, GroupFailedError, from_failure
from alchemist_ray.gang.control_channel import MANAGER_GONE
from alchemist_ray.runtime.cluster.names import NAMESPACE, group_name
from mpi_workers.failures import Failure


def ask(ref: Any, timeout_s: float | None = None) -> Any:
    """The result of an actor call. Raises what the actor raised instead of `RayTaskError`."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        if (cause := told(error)) is not error:
            raise cause from None
        raise


def told(error: BaseException) -> BaseException:
    """The package's error, if an actor or a rank has raised one; else the same exception."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, Failure):
        return from_failure(cause)
    return cause if isinstance(cause, AlchemistError) else error


def ask_manager(ref: Any, timeout_s: float | None = None) -> Any:
    """The result of a GroupManager's call. Its death is reported as the end of its gang."""
    try:
        return ask(ref, timeout_s)
    except RayActorError as error:
        raise GroupFailedError(
            f"the gang's GroupManager has ended, and with it the gang. {NEXT_GANG}",
            cause=MANAGER_GONE,
        ) from error


async def result_of(ref: Any) -> Any:
    """The result of an actor call, awaited in another actor."""
    return await ref


@dataclass(frozen=True, slots=True)
class GangHandle:
    """A gang in its GroupManager: ``handle.NAME.remote(...)`` calls a method of `Gang`.

    Attributes
    ----------
    actor : actor handle
        The GroupManager, which may have other gangs.
    gang : str
    """

    actor: ActorHandle
    gang: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols of Python, such as pickle's
            raise AttributeError(name)
        actor: Any = self.actor
        return SimpleNamespace(remote=partial(actor.ask.remote, self.gang, name))


def find_gang(gang: str) -> GangHandle:
    """A gang of this Ray cluster. Raises `ValueError` if its GroupManager is not there."""
    return GangHandle(ray.get_actor(group_name(gang), namespace=NAMESPACE), gang)
