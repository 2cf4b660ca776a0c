"""Which of a machine's addresses to use: by the interface's name, or by the way to a peer."""

from __future__ import annotations

import fcntl
import fnmatch
import socket
import struct
from collections.abc import Iterable

from alchemist_ray.errors import JobError

SIOCGIFADDR = 0x8915
DISCARD = 9  # a port; nothing is sent there


def interfaces() -> dict[str, str]:
    """The IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(told[20:24])
    return found


def address_of(wanted: Iterable[str], here: dict[str, str]) -> str:
    """The address of the first interface that a name or pattern fits. Raises `JobError`."""
    for pattern in wanted:
        for name in sorted(here):
            if fnmatch.fnmatchcase(name, pattern):
                return here[name]
    raise JobError(
        f"no interface {' or '.join(wanted)} (nodes.interface of the site file) on "
        f"{socket.gethostname()}, which has {', '.join(f'{n} ({a})' for n, a in here.items())}"
    )


def address_towards(host: str) -> str:
    """This machine's address on the way to another. Raises `JobError`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, DISCARD))
        except OSError as error:
            raise JobError(f"{socket.gethostname()} knows no way to {host}: {error}") from None
        return str(sock.getsockname()[0])


def local_address(wanted: list[str], peer: str) -> str:
    """This node's address: of the interface, else on the way to `peer` (``tcp:host:port``)."""
    if wanted:
        return address_of(wanted, interfaces())
    return address_towards(peer.split(":")[1])
