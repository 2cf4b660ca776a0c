"""Runs transfers: why one broke, whether it is repeated, how many bytes took which route."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from alchemist_ray.attached.connection import NODE_FAILED, GangConnection
from alchemist_ray.errors import GroupRecoveredError, TransferError, from_failure
from alchemist_ray.measures import events
from mpi_workers.data.description import NodeTimes
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import WireError

T = TypeVar("T")

FAILURE_NEWS_S = 2.0  # how long the dispatcher may take to report what broke a transfer
WATCH_POLL_S = 0.05
RECOVERED = "ranks were lost during the transfer, and the gang was started again: repeat it"


def watched(connection: GangConnection, transfer: Callable[[], T]) -> T:
    """Run a transfer. If it breaks because the gang is dying, raise that instead.

    Raises
    ------
    GroupRecoveredError
        If ranks were lost meanwhile and the gang was started again: the transfer can be
        repeated.
    """
    epoch = connection.address.epoch
    try:
        return transfer()
    except (Failure, WireError, OSError, TransferError) as error:
        known = isinstance(error, TransferError) and error.facts.get("cause") == NODE_FAILED
        # Another failure is an answer of ranks; those of a later epoch do not know what is sent.
        known = known or (isinstance(error, Failure) and error.kind != "TransferError")
        deadline = time.monotonic() + (0.0 if known else FAILURE_NEWS_S)
        while True:
            connection.ping(wait=True)  # raises GroupFailedError once it is known
            if connection.address.epoch != epoch:
                raise GroupRecoveredError(RECOVERED) from error
            if time.monotonic() >= deadline:
                break
            time.sleep(WATCH_POLL_S)
        if isinstance(error, Failure):
            raise from_failure(error) from error.__cause__
        raise


def repeated(transfer: Callable[[], T]) -> T:
    """Run a transfer, and run it again each time ranks are lost meanwhile."""
    while True:
        try:
            return transfer()
        except GroupRecoveredError:
            continue


def counted(direction: str, times: dict[int, NodeTimes], begun: events.Moment) -> None:
    """Count a transfer that has ended, by the routes that its bytes took."""
    routes: Counter[str] = Counter()
    for node in times.values():
        routes[node.route] += node.nbytes
    total = routes.total()
    parts = [
        {"direction": direction, "route": route, "nbytes": nbytes, "share": nbytes / max(1, total)}
        for route, nbytes in routes.items()
    ]
    events.note_span(events.TRANSFER, direction, begun, parts, nbytes=total)
