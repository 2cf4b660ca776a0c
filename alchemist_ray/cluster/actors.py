"""Our actors in a Ray cluster: their names, and calls of their methods.

Driver and agents outlive the job that started them. They are shared by jobs of the same version
of this package and of Python. Each runtime environment of a job has its own ones, which end with
the job, so that no code or variable of one job runs in another. A detached gang of such a job has
its own ones, which end with the gang.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from alchemist_ray.attached.control_channel import MANAGER_GONE
from alchemist_ray.errors import NEXT_GANG, AlchemistError, GroupFailedError, from_failure
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

NAMESPACE = "alchemist"
AGENT_PREFIX = "alchemist-agent-"
GROUP_PREFIX = "alchemist-group-"
PRIVATE_GANG = re.compile("(g[0-9a-f]{8})[0-9a-f]{4,8}")  # an id, which begins with its manager's


def job_environment() -> str:
    """The job's id and a digest of this process's runtime environment; empty if it has none.

    Tasks and actors of one job may have different environments.
    """
    context = ray.get_runtime_context()
    own = {key: value for key, value in dict(context.runtime_env).items() if value}
    if not own:
        return ""
    text = json.dumps(own, sort_keys=True, default=str)
    return f"{context.get_job_id()}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def edition(gang: str = "") -> str:
    """Part of the names of Driver and agents: which jobs, or which detached gang, use them."""
    python = f"py{sys.version_info[0]}.{sys.version_info[1]}"
    job = job_environment()
    user = f"-gang-{gang}" if gang else f"-job-{job}"
    return f"{__version__}-{python}" + (user if job else "")


def driver_name(edition: str) -> str:
    """The Ray name of the Driver."""
    return f"alchemist-driver-{edition}"


def actors_named(prefix: str) -> list[str]:
    """The names of our actors in this Ray cluster that begin with this, without it."""
    found = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in found if actor["namespace"] == NAMESPACE]
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def other_versions() -> list[str]:
    """Versions of this package, other than this one, that have a Driver in this Ray cluster."""
    found = {edition.split("-py")[0] for edition in actors_named(driver_name(""))}
    return sorted(found - {__version__})


def agent_name(edition: str, node_id: str) -> str:
    """The Ray name of a node's agent."""
    return f"{AGENT_PREFIX}{edition}-{node_id}"


def group_name(gang: str) -> str:
    """The Ray name of a gang's GroupManager."""
    private = PRIVATE_GANG.fullmatch(gang)
    return f"{GROUP_PREFIX}{gang if private is None else private[1]}"


def reservation_name(gang: str, run: str) -> str:
    """The Ray name of the placement group of an incarnation."""
    return f"{GROUP_PREFIX}{gang}:{run}"


def gang_and_run(reservation: str) -> tuple[str, str] | None:
    """The gang and incarnation of a placement group; None if it is not ours."""
    if not reservation.startswith(GROUP_PREFIX):
        return None
    gang, _, run = reservation.removeprefix(GROUP_PREFIX).partition(":")
    return gang, run


def ask(ref: Any, timeout_s: float | None = None) -> Any:
    """The result of an actor call. Raises what the actor raised instead of `RayTaskError`."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        raise told(error) from None


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


@dataclass(eq=False)
class GangHandle:
    """A gang in its GroupManager: calls methods of the same names of `GangSlot` and `Gang`.

    Each returns an ObjectRef; `ask_manager` waits for its result.

    Attributes
    ----------
    actor : actor handle
        The GroupManager, which may have other gangs.
    gang : str
    """

    actor: ActorHandle
    gang: str

    def _ask(self, method: str, *args: Any) -> Any:
        actor: Any = self.actor
        return actor.ask.remote(self.gang, method, *args)

    def expect_launch(self) -> Any:
        return self._ask("expect_launch")

    def launch(self, request: Any) -> Any:
        return self._ask("launch", request)

    def gang_address(self) -> Any:
        return self._ask("gang_address")

    def about(self) -> Any:
        return self._ask("about")

    def call(self, epoch: int, body: Body, holder: str) -> Any:
        return self._ask("call", epoch, body, holder)

    def end_results(self, tokens: list[str]) -> Any:
        return self._ask("end_results", tokens)

    def function(self, request: Any, body: Body, *values: Any) -> Any:
        return self._ask("function", request, body, *values)

    def own_gang(self, request: Any) -> Any:
        return self._ask("own_gang", request)

    def cancel(self) -> Any:
        return self._ask("cancel")

    def keep_source(self, epoch: int, matrix: int, source: Any) -> Any:
        return self._ask("keep_source", epoch, matrix, source)

    def holding(self, reservation: str) -> Any:
        return self._ask("holding", reservation)

    def resize(self, epoch: int, workers: int) -> Any:
        return self._ask("resize", epoch, workers)

    def stop_resize(self) -> Any:
        return self._ask("stop_resize")

    def end(self, *why: str) -> Any:
        return self._ask("end", *why)

    def kill(self, why: str) -> Any:
        return self._ask("kill", why)


def find_gang(gang: str) -> GangHandle:
    """A gang of this Ray cluster. Raises `ValueError` if its GroupManager is not there."""
    return GangHandle(ray.get_actor(group_name(gang), namespace=NAMESPACE), gang)
