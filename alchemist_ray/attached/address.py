"""GangAddress: how a process reaches the gang that a GroupManager has started."""

from __future__ import annotations

import getpass
import hashlib
import hmac
import os
import platform
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mpi_workers.data.description import NodeAddress
from mpi_workers.deadlines import STUCK_S


class OnGang(Protocol):
    """What a gang holds, a matrix or a library, and an incarnation of the gang that holds it."""

    @property
    def name(self) -> str: ...
    @property
    def session(self) -> str: ...
    @property
    def gang(self) -> str: ...
    @property
    def epoch(self) -> int: ...


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
    hosts, node_ids : tuple of str
        The name and the Ray id of each node. `list_workers` describes each rank.
    incarnation : str
        Name of this incarnation: of its processes, folders and reservation.
    shared : bool
        Whether it has a name, by which other programs attach.
    lease_grace_s : float
        How long a process that loses its connection keeps its leases, and can resume it.
    idle_timeout_s : float or None
        The gang ends after this many seconds without a command.
    stuck_timeout_s : float
        It ends if ranks have not returned this many seconds after their call has failed.
    first_epoch : int
        Handles of this epoch and later ones are valid: their matrices were carried over.
    recovers : bool
        Whether it is started again after the loss of ranks.
    stale : dict of int to str
        Matrices that were lost with ranks and could not be rebuilt, and why.
    checkpoint_folder : str or None
    """

    gang: str
    session: str
    epoch: int
    token: str = field(repr=False)
    addresses: tuple[str, ...]
    nodes: tuple[NodeAddress, ...]
    incarnation: str
    hosts: tuple[str, ...] = ()
    node_ids: tuple[str, ...] = ()
    shared: bool = False
    lease_grace_s: float = 0.0
    idle_timeout_s: float | None = None
    stuck_timeout_s: float = STUCK_S
    first_epoch: int = 1
    recovers: bool = False
    stale: dict[int, str] = field(default_factory=dict)
    checkpoint_folder: str | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(node.count for node in self.nodes)

    def hosts_of_ranks(self) -> list[str]:
        """The name of each rank's node."""
        places = zip(self.nodes, self.hosts, strict=True)
        return [host for node, host in places for _ in range(node.count)]

    def move(self) -> dict[str, Any]:
        """The address for attached processes of the incarnation before, without the secret."""
        return {
            "epoch": self.epoch,
            "addresses": list(self.addresses),
            "nodes": [[node.first, node.count, list(node.addresses)] for node in self.nodes],
            "hosts": list(self.hosts),
            "node_ids": list(self.node_ids),
            "incarnation": self.incarnation,
            "stale": [[ident, reason] for ident, reason in self.stale.items()],
        }

    def moved(self, fields: dict[str, Any]) -> GangAddress:
        """The address of the next incarnation, from its `move`."""
        return replace(
            self,
            epoch=fields["epoch"],
            token=next_token(self.token),
            addresses=tuple(fields["addresses"]),
            nodes=tuple(NodeAddress(first, n, tuple(its)) for first, n, its in fields["nodes"]),
            hosts=tuple(fields["hosts"]),
            node_ids=tuple(fields["node_ids"]),
            incarnation=fields["incarnation"],
            stale=dict(map(tuple, fields["stale"])),
        )


def next_token(token: str) -> str:
    """The secret of the incarnation after one with this secret; it crosses no wire."""
    return hmac.new(token.encode(), b"next incarnation", hashlib.sha256).hexdigest()


def this_process() -> str:
    """This process as others see it: ``user@host (pid 123)``."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container without a name for this user
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{platform.node()} (pid {os.getpid()})"
