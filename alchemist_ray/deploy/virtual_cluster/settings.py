"""Settings of a guest: lines of shell that its init reads from QEMU's firmware configuration."""

from __future__ import annotations

import shlex

from alchemist_ray.deploy.virtual_cluster.options import MEBI, PORT, STORE_SHARE, Guest, Options


def settings(options: Options, guest: Guest, token: str) -> str:
    """Return a guest's name, addresses and parameters of Ray."""
    everybody = range(options.hosts * options.guests)
    hosts = "\n".join(f"{options.address(n)} {options.hostname(n)}" for n in everybody)
    told = {
        "NAME": guest.name,
        "ADDRESS": f"{guest.address}/{options.net.prefixlen}",
        "IP": guest.address,
        "MTU": str(options.mtu),
        "ROLE": "head" if guest.is_head else "node",
        "HEAD": f"{options.address(0)}:{PORT}",
        "PORT": str(PORT),
        "CPUS": str(len(guest.cpus)),
        "STORE": str(int(guest.memory_mib * MEBI * STORE_SHARE)),
        "TOKEN": token,
        "HOSTS": hosts,
    }
    if options.static_arp:
        others = (number for number in everybody if number != guest.number)
        told["ARP"] = "\n".join(f"{options.address(n)} {options.mac(n)}" for n in others)
    if options.volume is not None:
        told["VOLUME"] = "/dev/vdb"
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in told.items())
