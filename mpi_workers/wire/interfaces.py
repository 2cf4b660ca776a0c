"""Network interfaces of this machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def interfaces() -> dict[str, str]:
    """The first IPv4 address of every interface that has one."""
    return {
        name: its.address
        for name, addresses in psutil.net_if_addrs().items()
        for its in reversed(addresses)
        if its.family == socket.AF_INET
    }


def interface_of(host: str) -> str | None:
    """Name of the interface with an IPv4 or IPv6 address, or None."""
    wanted = host.partition("%")[0]  # without the scope of a link-local address
    if ":" in wanted:
        wanted = str(ipaddress.IPv6Address(wanted))
    for name, addresses in psutil.net_if_addrs().items():
        if any(its.address.partition("%")[0] == wanted for its in addresses):
            return str(name).partition(":")[0]  # without the label of a further address
    return None
