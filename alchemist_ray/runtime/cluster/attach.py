"""Connects a process to a gang by the gang's GroupManager, found by name in the Ray cluster."""

from __future__ import annotations

import ray

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.errors import GroupFailedError, SessionError, StaleHandleError
from alchemist_ray.gang.address import GangAddress, OnGang
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.control_channel import MANAGER_GONE
from alchemist_ray.gang.options import ConnectionOptions
from alchemist_ray.observe import exporter
from alchemist_ray.runtime.cluster.ray_calls import GangHandle, ask_manager, find_gang
from alchemist_ray.runtime.commands.remote_results import RemoteResults

ATTACH_TIMEOUT_S = 30.0


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
        manager=manager,
        result_type=RemoteResults,
        current=lambda: ask_manager(manager.gang_address.remote(), ATTACH_TIMEOUT_S),
        keeper=lambda *about: ask_manager(manager.keep_source.remote(*about)),
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
    """
    if not ray.is_initialized():
        raise StaleHandleError(
            f"{ref.name} is on a gang of session {ref.session}, and this process is in no Ray "
            "cluster: if that gang still runs, join its cluster with ray.init(address=...), else "
            "make or load it again in another gang"
        )
    try:
        manager = find_gang(ref.gang)
        address: GangAddress = ask_manager(manager.gang_address.remote(), ATTACH_TIMEOUT_S)
        if address.session != ref.session:
            raise ValueError  # the GroupManager runs the gang of another session now
    except (ValueError, SessionError, GroupFailedError) as error:
        if isinstance(error, GroupFailedError) and error.facts.get("cause") != MANAGER_GONE:
            raise  # it says what happened
        return None
    return connect(address, manager)
