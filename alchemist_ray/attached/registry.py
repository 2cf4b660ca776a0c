"""The gangs that this process is attached to: how a handle finds its gang.

This is the one module with late imports: how gangs are reached depends on the address, and a
handle that arrives in a new process connects through modules that import everything that makes
handles.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import weakref
from collections.abc import Callable
from types import ModuleType

from alchemist_ray.attached.address import GangAddress, OnGang
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.leases import MatrixLease
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.errors import SessionError, StaleHandleError

ADDRESS_VARIABLE = "ALCHEMIST_ADDRESS"
SCHEME = "alchemist://"
RAY, GATEWAY = "alchemist_ray.ray_access.ray_gangs", "alchemist_ray.gateway.client"
GATEWAY_ACTOR = "alchemist_ray.gateway.server.actor"

_lock = threading.Lock()  # guards the two tables
_attached: dict[tuple[str, str], GangConnection] = {}  # by gang, and gateway or ""
# By gang, while a thread has it.
_connecting: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()


def access(address: str | None = None, token: str | None = None) -> ModuleType:
    """The module that reaches gangs at an address; None: of the environment.

    It has `open_gangs`, `attach`, `list_gangs`, `stop_gang` and `connect_to_gang_of`. Raises
    `SessionError` for a token without a gateway.
    """
    wanted = os.environ.get(ADDRESS_VARIABLE, "") if address is None else address
    if not isinstance(wanted, str):
        raise SessionError(
            f"address={wanted!r}: it must be a string, 'alchemist://host:port' of a gateway or "
            "'host:port' of a Ray cluster"
        )
    through_gateway = wanted.startswith(SCHEME) or importlib.util.find_spec("ray") is None
    if token is not None and not through_gateway:
        raise SessionError(
            f"token= is for a gateway, and the address is {wanted or 'not given'}: give "
            f"address='{SCHEME}host:port' or set {ADDRESS_VARIABLE}, or leave out the token"
        )
    return importlib.import_module(GATEWAY if through_gateway else RAY)


def gateway_actor() -> ModuleType:
    """The module that starts gateways: it needs Ray, and what sessions need."""
    return importlib.import_module(GATEWAY_ACTOR)


def _key(address: GangAddress) -> tuple[str, str]:
    """Sessions inside and through a gateway have connections of their own to the same gang."""
    first = next(iter(address.addresses), "")
    return address.gang, first if first.startswith(SCHEME) else ""


def attach(connection: GangConnection) -> None:
    """Let handles in this process find their gang.

    A connection to an earlier epoch is closed, and so are those to gangs that have ended: a process
    that gets handles of one session after the other keeps neither their sockets nor their threads.
    """
    key = _key(connection.address)
    with _lock:
        old = _attached.get(key)
        _attached[key] = connection
        others = [found for found in _attached.values() if found is not connection]
    if old is not None and old is not connection:
        old.close()
    for other in others:
        if other.over:
            detach(other)


def detach(connection: GangConnection) -> None:
    """Close a connection; handles of its gang connect again when they are used."""
    connection.close()
    key = _key(connection.address)
    with _lock:
        if _attached.get(key) is connection:
            del _attached[key]


def join(address: GangAddress, connect: Callable[[], GangConnection]) -> GangConnection:
    """This process's connection for one more session on a gang; `leave` is its counterpart."""
    with _connecting_to(address.gang):
        with _lock:
            connection = _attached.get(_key(address))
        if connection is not None and not connection.closed and connection.address == address:
            connection.begin_session()
            return connection
        connection = connect()
        connection.begin_session()
        attach(connection)
        return connection


def leave(connection: GangConnection) -> None:
    """A session no longer uses a connection; the last one closes it."""
    if connection.end_session():
        detach(connection)


def _connecting_to(gang: str) -> threading.Lock:
    with _lock:
        return _connecting.setdefault(gang, threading.Lock())


def lease_of(ref: MatrixRef) -> MatrixLease | None:
    """A lease on a matrix whose handle has just arrived: attaches this process to its gang.

    None if that fails: the error comes when the handle is used.
    """
    try:
        return gang_of(ref).lease(ref.id)
    except Exception:  # an object of Ray must be readable
        return None


def gang_of(ref: OnGang) -> GangConnection:
    """The connection to the gang of a matrix or library, opened at first use. Thread-safe.

    Raises
    ------
    StaleHandleError
        If that gang has ended.
    GroupFailedError
        If it was lost, with the cause.
    """
    connection = _known(ref)
    if connection is not None:
        return connection
    with _connecting_to(ref.gang):  # one thread connects, the others of this gang wait for it
        connection = _known(ref)
        if connection is None:
            connection = access().connect_to_gang_of(ref)
            if connection is None:
                raise StaleHandleError(
                    f"{ref.name} belonged to a gang of session {ref.session}, which has ended: "
                    "make or load it again in another gang"
                )
            if isinstance(ref, MatrixRef):  # a gang says itself which libraries it has
                connection.check(ref)
            attach(connection)
        return connection


def _known(ref: OnGang) -> GangConnection | None:
    with _lock:
        found = [connection for (gang, _), connection in _attached.items() if gang == ref.gang]
    for connection in found:
        address = connection.address
        current = address.session == ref.session and address.epoch >= ref.epoch
        if current and not connection.closed:
            return connection
    return None


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _connecting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
