"""GangRequest: what a session asks of its GroupManager. Options, limits: `attached.options`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from alchemist_ray.arguments import checked_choice
from alchemist_ray.attached.address import this_process
from alchemist_ray.attached.options import PLACEMENTS, GangOptions, Workers, least_of
from alchemist_ray.cluster.placement import Reservation, check_capacity, inherited
from alchemist_ray.cluster.ray_cluster import tell_threads
from alchemist_ray.errors import ResourceError
from alchemist_ray.launchers import chosen, settings
from alchemist_ray.measures.logs import log_settings


@dataclass(frozen=True, slots=True)
class GangRequest:
    """The gang that a session asks for.

    Attributes
    ----------
    options : GangOptions
        As the user gave them, with the launcher that `"auto"` stands for.
    workers : int
        Ranks.
    session : str
        Its id.
    owner : str
        Who asks, for the catalogue: ``user@host (pid 123)``.
    settings : dict of str to str
        Environment of the caller that its launcher reads.
    inherited : Reservation, optional
        Nodes that the caller has reserved. None: the gang reserves its own.
    bounds : (int, int), optional
        Fewest and most ranks of a gang that grows and shrinks with the cluster.
    after : int
        Epoch of the session's last gang: this one has a later one, also if that gang's GroupManager
        has ended, so that its handles are recognized.
    """

    options: GangOptions
    workers: int
    session: str
    owner: str
    settings: dict[str, str]
    inherited: Reservation | None = None
    bounds: tuple[int, int] | None = None
    after: int = 0

    @classmethod
    def of(
        cls,
        options: GangOptions,
        num_workers: Workers,
        session: str,
        owner: str = "",
        after: int = 0,
    ) -> GangRequest:
        """A request of this process. Raises `ValueError`, `ResourceError`."""
        bounds = None if isinstance(num_workers, int) else num_workers
        workers = least_of(num_workers)
        if bounds is not None and options.placement != "own":
            raise ResourceError(
                f"num_workers={bounds} needs placement='own': a gang that grows reserves its CPUs"
            )
        tell_threads(options.threads_per_worker, options.env or {})
        placement = options.placement
        if placement == "own":
            given = None
            check_capacity(workers, options.each, options.strategy)
        elif isinstance(placement, Reservation):
            given = placement.of(workers)
        else:
            given = inherited(workers, options.each)
        return cls(
            replace(options, launcher=chosen(options.launcher), placement="own", token=None),
            workers, session, owner or this_process(), settings() | log_settings(os.environ),
            given, bounds, after,
        )  # fmt: skip

    @property
    def checkpoint_folder(self) -> str | None:
        """The absolute path of the option."""
        folder = self.options.checkpoint_folder
        return None if folder is None else os.fspath(folder)

    @property
    def user(self) -> str:
        """The account of `owner`, for limits."""
        return self.owner.partition("@")[0]


def check_in_cluster(options: GangOptions) -> None:
    """Check what only a process with Ray can check. Raises `ValueError`."""
    chosen(options.launcher)
    if not isinstance(options.placement, Reservation):
        checked_choice("placement", options.placement, PLACEMENTS)
