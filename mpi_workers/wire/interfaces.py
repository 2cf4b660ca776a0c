"""Network interfaces of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915


def interfaces() -> dict[str, str]:
    """The IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
