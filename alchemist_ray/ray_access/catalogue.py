"""The catalogue of a cluster's gangs: lists them, finds one by name, connects to one, ends one.

Each GroupManager has a name in Ray's GCS and answers for its own gang, so the catalogue does not
depend on the Driver.
"""

from __future__ import annotations

import contextlib
import platform
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.attached.address import GangAddress, OnGang
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.control_channel import MANAGER_GONE
from alchemist_ray.attached.info import NOT_ANSWERING, GangInfo
from alchemist_ray.attached.options import ConnectionOptions, GangOptions
from alchemist_ray.cluster.actors import (
    GROUP_PREFIX,
    NAMESPACE,
    GangHandle,
    actors_named,
    ask,
    ask_manager,
    driver_name,
    edition,
    find_gang,
)
from alchemist_ray.errors import (
    AlchemistError,
    GroupError,
    GroupFailedError,
    SessionError,
    StaleHandleError,
)
from alchemist_ray.measures import exporter
from alchemist_ray.ray_access import manager_pool
from alchemist_ray.ray_access.manager_pool import OwnGang
from alchemist_ray.ray_access.ray_transport import ATTACH_TIMEOUT_S, RayTransport
from alchemist_ray.version import __version__
from mpi_workers.deadlines import GANG_END_S
from mpi_workers.wire.frames import Body

ANSWER_S = 5.0  # a GroupManager that takes longer is listed as not answering
GONE_TIMEOUT_S = 10.0  # for Ray to forget an actor that has ended
POLL_INTERVAL_S = 0.01


def list_gangs(*, memory: bool = False) -> list[GangInfo]:
    """Every gang of the cluster, by name; `memory`: with the free memory of its nodes.

    Managers without a gang are left out.
    """
    asked: dict[Any, str] = {}
    for name in actors_named(GROUP_PREFIX):
        try:
            manager: Any = find_gang(name).actor
        except ValueError:
            continue  # it has just ended
        asked[manager.gangs.remote(memory=memory)] = name
    found = []
    if not asked:
        return []
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
    for ref in done:
        try:
            entries: list[Body] = ray.get(ref)
        except RayError:
            continue  # it has just ended
        found += [GangInfo.of(entry) for entry in entries if entry["state"] != "none"]
    found += [GangInfo(asked[ref], NOT_ANSWERING) for ref in late]
    return sorted(found, key=lambda gang: gang.name)


def connect(
    address: GangAddress,
    manager: GangHandle,
    options: ConnectionOptions | None = None,
    *,
    owner: bool = False,
) -> GangConnection:
    """A connection to a gang of this Ray cluster. `owner`: the gang ends with this process."""
    exporter.start()
    return GangConnection(
        address,
        Handle,
        transport=RayTransport(manager),
        options=options,
        owner=owner,
    )


def connect_to_gang_of(ref: OnGang) -> GangConnection | None:
    """A connection to the gang of a matrix or library; None if that gang has ended.

    Raises
    ------
    GroupFailedError
        If it was lost, with the cause.
    StaleHandleError
        If this process is in no Ray cluster.
    SessionError
        If the gang is of another version of this package or of Python.
    """
    if not ray.is_initialized():
        raise StaleHandleError(
            f"{ref.name} is on a gang of session {ref.session}, and this process is in no Ray "
            "cluster: if that gang still runs, join its cluster with ray.init(address=...), else "
            "make or load it again in another gang"
        )
    try:
        manager = find_gang(ref.gang)
        entry = ask_manager(manager.about(), ATTACH_TIMEOUT_S)
        address: GangAddress = ask_manager(manager.gang_address(), ATTACH_TIMEOUT_S)
        if address.session != ref.session:
            raise ValueError  # the GroupManager runs the gang of another session now
    except (ValueError, SessionError, GroupFailedError) as error:
        if isinstance(error, GroupFailedError) and error.facts.get("cause") != MANAGER_GONE:
            raise  # it says what happened
        return None
    _check_version(ref.gang, entry)
    return connect(address, manager)


def _entry(name: str) -> tuple[GangHandle | None, Body]:
    """A gang's GroupManager, None if it is not there, and its entry in the catalogue."""
    try:
        manager = find_gang(name)
    except ValueError:
        return None, {"state": "none"}
    try:
        return manager, ask(manager.about(), ANSWER_S)
    except SessionError:  # it has no gang, or none yet
        return manager, {"state": "none"}
    except GetTimeoutError:
        return manager, {"state": NOT_ANSWERING}
    except RayError:
        return manager, {"state": "ending"}


def find_manager(name: str) -> GangHandle:
    """The GroupManager of a gang.

    Raises
    ------
    SessionError
        If there is no such gang, with the names of those that there are; if it has no name; if
        it is of another version of this package or of Python.
    GroupFailedError
        If it was lost with its GroupManager.
    """
    manager, entry = _entry(name)
    if entry["state"] == NOT_ANSWERING:
        raise SessionError(
            f"the GroupManager of gang {name} did not answer in {ANSWER_S:.0f} s: is its node up? "
            f"`alchemist stop {name}` ends it"
        )
    if manager is None or entry["state"] == "none" or "named" not in entry:
        _check_lost(name)
        raise _unknown(name)
    if not entry["named"]:
        raise SessionError(
            f"gang {name} is private: AlchemistSession(..., name='...') makes one that other "
            "programs can attach to"
        )
    _check_version(name, entry)
    return manager


def _check_lost(name: str) -> None:
    """Raise `GroupFailedError` if the GroupManager of a gang was lost."""
    since = None
    with contextlib.suppress(ValueError, GetTimeoutError, RayError):  # there is no Driver
        driver = ray.get_actor(driver_name(edition()), namespace=NAMESPACE)
        since = ask(driver.lost.remote(name), ANSWER_S)
    if since is not None:
        raise GroupFailedError(
            f"gang {name} was lost {time.time() - since:.0f} s ago: its GroupManager, which had "
            "its submitted calls and their results, was killed or lost with its node, and the "
            "matrices with it. Start another one; AlchemistSession.restore(folder) reads a "
            "checkpoint"
        )


def _unknown(name: str) -> SessionError:
    known = ", ".join(gang.name for gang in list_gangs() if gang.named) or "none"
    return SessionError(f"there is no gang {name!r} in this Ray cluster; its gangs: {known}")


def _check_version(name: str, entry: Body) -> None:
    python, own = (text.rpartition(".")[0] for text in (entry["python"], platform.python_version()))
    if (entry["version"], python) != (__version__, own):
        raise SessionError(
            f"gang {name} runs alchemist-on-ray {entry['version']} with Python {python}, and this "
            f"process has {__version__} with Python {own}: use the gang's environment"
        )


def stop(name: str) -> None:
    """End a gang, for all its attached processes; returns when its CPUs are free.

    Raises
    ------
    SessionError
        If there is no such gang.
    """
    manager, entry = _entry(name)
    if manager is None or entry["state"] == "none":
        raise _unknown(name)
    try:
        ask(manager.end(f"gang {name} was stopped (stop_gang)"), GANG_END_S)
    except AlchemistError:  # it is being started
        ask(manager.actor.forget.remote(name), GANG_END_S)
    except (GetTimeoutError, RayError):
        ray.kill(manager.actor)  # its ranks end with it
        _wait_gone(name)
        return
    if entry.get("detached", True):
        _wait_gone(name)


def cancel(name: str) -> int:
    """Cancel all calls of a gang; their number. Raises `SessionError` if there is no such gang."""
    try:
        manager = find_gang(name)
        return int(ask(manager.cancel(), ANSWER_S))
    except (ValueError, ray.exceptions.RayActorError):
        raise _unknown(name) from None


def start_named(options: GangOptions) -> OwnGang:
    """A GroupManager for a gang with a name; that of a failed gang is replaced.

    Raises
    ------
    GroupError
        If the name is in use.
    """
    name = options.name
    assert name is not None
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while True:
        try:
            return manager_pool.take_named(name, detached=options.detached)
        except ValueError:
            state = _entry(name)[1]["state"]
        if state == "failed":
            stop(name)
        elif state not in ("ending", "none") or time.monotonic() > deadline:
            raise GroupError(
                f"there is a gang {name!r} already ({state}): attach to it with "
                f"AlchemistSession.attach({name!r}), end it with "
                f"AlchemistSession.stop_gang({name!r}), or choose another name"
            )
        time.sleep(POLL_INTERVAL_S)


def _wait_gone(name: str) -> None:
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            manager = find_gang(name)
        except ValueError:
            return
        time.sleep(POLL_INTERVAL_S)
    ray.kill(manager.actor)
