"""`ray.get` for calls of our actors: raises the package's errors."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from alchemist_ray.errors import NEXT_GANG, AlchemistError, GroupFailedError, from_failure
from alchemist_ray.gang.control_channel import MANAGER_GONE
from mpi_workers.failures import Failure


def ask(ref: Any, timeout_s: float | None = None) -> Any:
    """The result of an actor call. Raises what the actor raised instead of `RayTaskError`."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, AlchemistError):
            raise error.cause from None
        if isinstance(error.cause, Failure):
            raise from_failure(error.cause) from None
        raise


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
