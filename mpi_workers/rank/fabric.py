"""Where MPI listens.

A gang on one node needs no network: its ranks exchange messages through shared memory. A gang on
several nodes listens only on the interface of its node's address, on the loopback interface, and on
InfiniBand devices. A site's own settings are kept.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from mpi_workers.wire.interfaces import interface_of

INFINIBAND = Path("/sys/class/infiniband")
# UCX: loopback and shared memory (System V, POSIX, CMA). UCX removes the names of its segments as
# soon as they are mapped, so none remains after SIGKILL.
UCX_ONE_NODE = "self,sm"
OFI_ONE_NODE = "shm"
LOOPBACK = "lo"


def limit_endpoints(
    host: str | None, *, one_node: bool, env: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables of UCX and libfabric that limit MPI's endpoints. Call it before MPI_Init.

    Parameters
    ----------
    host : str or None
        This node's address.
    one_node : bool
        Whether all ranks of the gang are on this node.
    env : mapping
        Variables that are set already are kept.
    """
    if one_node:
        env.setdefault("UCX_TLS", UCX_ONE_NODE)
        if env.get("MPIR_CVAR_CH4_NETMOD") == "ofi":
            env.setdefault("FI_PROVIDER", OFI_ONE_NODE)
        return
    interface = interface_of(host) if host is not None else None
    if interface is None:
        if host is not None:
            sys.stderr.write(f"no interface has the address {host}: MPI listens on all of them\n")
        return
    # Without the loopback device, ranks of one node crash in UCX when they exchange messages.
    devices = dict.fromkeys([interface, LOOPBACK, *_infiniband_ports()])
    env.setdefault("UCX_NET_DEVICES", ",".join(devices))
    env.setdefault("FI_TCP_IFACE", interface)


def _infiniband_ports() -> list[str]:
    """Active InfiniBand and RoCE ports by UCX's names: ``mlx5_0:1``."""
    ports = []
    for path in sorted(INFINIBAND.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in (path / "state").read_text():
                ports.append(f"{path.parents[1].name}:{path.name}")
    return ports
