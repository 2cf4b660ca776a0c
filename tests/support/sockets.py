"""The ports on which a process listens, from /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TCP_LISTEN, UDP_UNCONNECTED = "0A", "07"


def listening_ports(pid: int) -> list[str]:
    """TCP and UDP ports of this process that accept packets, as ``tcp:0100007F:1F90``."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for kind, state in (("tcp", TCP_LISTEN), ("udp", UDP_UNCONNECTED)):
        for table in (kind, kind + "6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes and fields[3] == state:
                    found.append(f"{kind}:{fields[1]}")
    return sorted(found)
