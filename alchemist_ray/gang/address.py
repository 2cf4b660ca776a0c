"""GangAddress: how a process reaches the gang that a GroupManager has started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpi_workers.data.description import NodeAddress


@dataclass(frozen=True, slots=True)
class GangAddress:
    """How to reach a gang that is ready.

    Attributes
    ----------
    gang, session : str
        Ids of the gang and of the session that owns it.
    epoch : int
        Incarnation of the gang.
    token : str
        The gang's secret.
    addresses : tuple of str
        Of the dispatcher: ``unix:path`` first, then ``tcp:host:port``.
    nodes : tuple of NodeAddress
        The data endpoint of each node.
    workers : tuple of dict
        What each rank reported of itself, in rank order.
    incarnation : str
        Name of this incarnation: of its processes, folders and reservation.
    shared : bool
        Whether it has a name, by which other programs attach.
    lease_grace_s : float
        How long a process that loses its connection keeps its leases, and can resume it.
    idle_timeout_s : float or None
        The gang ends after so many seconds without a command.
    """

    gang: str
    session: str
    epoch: int
    token: str = field(repr=False)
    addresses: tuple[str, ...]
    nodes: tuple[NodeAddress, ...]
    workers: tuple[dict[str, Any], ...]
    incarnation: str
    shared: bool = False
    lease_grace_s: float = 0.0
    idle_timeout_s: float | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(node.count for node in self.nodes)
