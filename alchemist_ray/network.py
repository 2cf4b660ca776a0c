"""Choice of this machine's address: by the name of an interface, or by the route to a peer."""

from __future__ import annotations

import fnmatch
import socket
from collections.abc import Iterable, Sequence

from alchemist_ray.errors import JobError
from mpi_workers.wire.interfaces import interfaces

DISCARD_PORT = 9  # nothing is sent there


def address_of(patterns: Iterable[str], here: dict[str, str]) -> str:
    """Return the address of the first interface that matches a name or pattern.

    Raises
    ------
    JobError
        If no interface matches.
    """
    for pattern in patterns:
        for name in sorted(here):
            if fnmatch.fnmatchcase(name, pattern):
                return here[name]
    raise JobError(
        f"{socket.gethostname()} has no interface {' or '.join(patterns)} (nodes.interface of the "
        f"site file). It has: {', '.join(f'{n} ({a})' for n, a in here.items())}"
    )


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`. Raises `JobError`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, DISCARD_PORT))
        except OSError as error:
            raise JobError(f"{socket.gethostname()} has no route to {host}: {error}") from None
        return str(sock.getsockname()[0])


def local_address(patterns: Sequence[str], peer: str) -> str:
    """Return the address of the interface, if one is named, or on the route to `peer`, a host."""
    return address_of(patterns, interfaces()) if patterns else address_towards(peer)
