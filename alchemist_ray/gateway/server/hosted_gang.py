"""A gang that clients use through this gateway."""

from __future__ import annotations

from typing import Any

from alchemist_ray.errors import AlchemistError
from alchemist_ray.gang import registry
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gateway.protocol import GRACE_S
from alchemist_ray.gateway.server.transfers import GangTransfers
from alchemist_ray.runtime.ray_gangs import RayGangs
from mpi_workers.wire.frames import Body


class HostedGang:
    """The gateway's own connection to a gang, and what it knows of its use.

    Parameters
    ----------
    gangs : RayGangs
        Has started the gang, or is attached to it.
    connection : GangConnection
    user : str
        Who has started it; empty for a gang that was not started here.
    owner : str
        The client process with which it ends; empty if it stays.
    most : int
        Ranks to which it may grow by itself; 0 if it does not.
    """

    def __init__(
        self, gangs: RayGangs, connection: GangConnection, user: str, owner: str, most: int = 0
    ) -> None:
        self._gangs = gangs
        self.connection = connection
        self.user = user
        self.owner = owner
        self._most = most
        self.transfers = GangTransfers(connection)
        self.clients: set[Any] = set()  # of `relay.Client`
        self.ended = False
        self.results: dict[str, Any] = {}  # results of functions that a client collects, by name
        self.renewal: Body | None = None  # for clients that do not know the ranks of now

    @property
    def name(self) -> str:
        return self.connection.address.gang

    @property
    def stays(self) -> bool:
        """Whether it was started here and outlives its clients: it counts for its user's quotas."""
        return bool(self.user) and not self.owner

    @property
    def ranks(self) -> int:
        """Ranks that count for its user's quota: those that it has, or to which it may grow."""
        return max(self._most, self.connection.address.size)

    def has_ended(self) -> bool:
        """Whether the gang cannot be reached any more. Blocks."""
        try:
            self.connection.ping()
        except AlchemistError:
            return True
        return False

    def nbytes(self) -> int:
        """Bytes of its matrices. Blocks."""
        return int(self.connection.request({"op": "status"})["nbytes"])

    def described(self) -> Body:
        """The description for clients, without secrets and addresses of the cluster."""
        address = self.connection.address
        return {
            "gang": address.gang,
            "session": address.session,
            "epoch": address.epoch,
            "first_epoch": address.first_epoch,
            "incarnation": address.incarnation,
            "size": address.size,
            "shared": address.shared,
            "idle_timeout_s": address.idle_timeout_s,
            "lease_grace_s": GRACE_S,
        }

    def resize(self, workers: int) -> None:
        """Move the gang to this many ranks. Blocks."""
        self._gangs.resize(self.connection, workers)
        self._most = 0  # it does not grow by itself any more
        self.connection.ping()  # it learns the addresses of the new ranks

    def stop_resize(self) -> None:
        """End a resize that is under way."""
        self._gangs.stop_resize(self.connection)

    def renewed(self, fields: Body) -> Body:
        """The gang has other ranks now; what clients are told of it."""
        self.connection.on_renewal(fields)
        address = self.connection.address
        if self.renewal is None or self.renewal["epoch"] < address.epoch:
            self.transfers.renew()
            self.renewal = {
                "epoch": address.epoch,
                "addresses": [],
                "nodes": [[0, address.size, []]],
                "hosts": [],
                "node_ids": [],
                "incarnation": address.incarnation,
                "stale": fields["stale"],
            }
        return self.renewal

    def kill(self, why: str) -> None:
        """End the gang at once. Blocks."""
        self._gangs.kill(why)
        self.close(end=True)

    def close(self, *, end: bool) -> None:
        """Leave the gang, or end it. Blocks; a second call does nothing."""
        if self.ended:
            return
        self.ended = True
        self.transfers.close()
        if end:
            fit = self._gangs.end(running=True)
            registry.detach(self.connection)
            self._gangs.close(reusable=fit)
        else:
            registry.leave(self.connection)
