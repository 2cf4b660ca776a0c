"""GangRequest: what a session asks of its GroupManager."""

from __future__ import annotations

from dataclasses import dataclass, field

from alchemist_ray.runtime.gang_lifetime import PRIVATE, GangLifetime
from alchemist_ray.runtime.placement import Reservation


@dataclass(frozen=True, slots=True)
class GangRequest:
    """The gang that a session asks for.

    Attributes
    ----------
    workers, threads : int
        Ranks, and BLAS threads of each.
    bounds : (int, int), optional
        Fewest and most ranks of a gang that grows and shrinks with the cluster.
    cpus : float
        CPUs to reserve for each rank.
    launcher : str
    start_timeout_s : float
    inherited : Reservation, optional
        Nodes that the caller has reserved. None: the gang reserves its own.
    session : str
    strategy : str
        Ray's placement strategy.
    settings : dict of str to str
        Environment of the caller that its launcher reads.
    lifetime : GangLifetime
    owner : str
        Who asks, for the catalogue: ``user@host (pid 123)``.
    max_failures : int
        How often the gang is started again after the loss of ranks.
    checkpoint_folder : str, optional
    after : int
        Epoch of the session's last gang: this one has a later one, also if that gang's GroupManager
        has ended, so that its handles are recognized.
    """

    workers: int
    threads: int
    cpus: float
    launcher: str
    start_timeout_s: float
    inherited: Reservation | None
    session: str
    strategy: str = "PACK"
    settings: dict[str, str] = field(default_factory=dict)
    lifetime: GangLifetime = PRIVATE
    owner: str = ""
    max_failures: int = 0
    checkpoint_folder: str | None = None
    bounds: tuple[int, int] | None = None
    after: int = 0

    @property
    def user(self) -> str:
        """The account of `owner`, for limits."""
        return self.owner.partition("@")[0]
