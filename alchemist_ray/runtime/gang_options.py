"""Options of a gang, checked before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass

from alchemist_ray.arguments import (
    MAX_SECONDS,
    checked_cpus,
    checked_path,
    checked_seconds,
    positive_int,
)
from alchemist_ray.errors import ResourceError
from alchemist_ray.gang.owner import Workers
from alchemist_ray.gang.process_name import this_process
from alchemist_ray.launchers import chosen, settings
from alchemist_ray.observe.logs import log_settings
from alchemist_ray.runtime.gang_lifetime import PRIVATE, GangLifetime
from alchemist_ray.runtime.gang_request import GangRequest
from alchemist_ray.runtime.placement import (
    PLACEMENTS,
    STRATEGIES,
    Reservation,
    check_capacity,
    inherited,
)


@dataclass(frozen=True, slots=True)
class GangOptions:
    """How a gang is placed and started; see `AlchemistSession`."""

    placement: str | Reservation
    threads: int
    cpus: float
    launcher: str
    start_timeout_s: float
    strategy: str = "PACK"
    lifetime: GangLifetime = PRIVATE
    max_failures: int = 0
    checkpoint_folder: str | None = None
    owner: str = ""

    @classmethod
    def checked(
        cls,
        placement: str | Reservation,
        threads_per_worker: int,
        cpus_per_worker: float | None,
        launcher: str,
        start_timeout_s: float,
        strategy: str = "PACK",
        lifetime: GangLifetime = PRIVATE,
        *,
        max_failures: int = 0,
        checkpoint_folder: str | os.PathLike[str] | None = None,
        owner: str = "",
    ) -> GangOptions:
        """Options as the user gave them. Raises `ValueError`."""
        if not isinstance(placement, Reservation) and placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}; got {placement!r}")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}")
        if strategy != "PACK" and placement != "own":
            raise ValueError(
                f"strategy={strategy!r} applies only with placement='own': otherwise "
                "the CPUs are reserved already"
            )
        if lifetime.detached and placement != "own":
            raise ValueError(
                "lifetime='detached' needs placement='own': a detached gang outlives its caller"
            )
        launcher = chosen(launcher)
        positive_int("threads_per_worker", threads_per_worker)
        cpus = float(threads_per_worker)
        if cpus_per_worker is not None:
            cpus = checked_cpus("cpus_per_worker", cpus_per_worker)
        start_timeout_s = checked_seconds("start_timeout_s", start_timeout_s, most=MAX_SECONDS)
        whole = isinstance(max_failures, int) and not isinstance(max_failures, bool)
        if not whole or max_failures < 0:
            raise ValueError(f"max_failures={max_failures!r}: it must be a whole number, 0 or more")
        return cls(
            placement, threads_per_worker, cpus, launcher, start_timeout_s, strategy, lifetime,
            max_failures, None if checkpoint_folder is None else _folder(checkpoint_folder),
            owner or this_process(),
        )  # fmt: skip

    def check_capacity(self, workers: int) -> None:
        """Whether the cluster could hold this many workers. Raises `ResourceError`."""
        if self.placement == "own":
            check_capacity(workers, self.cpus, self.strategy)
        else:
            self._given(workers)

    def request(self, num_workers: Workers, session: str, after: int = 0) -> GangRequest:
        """The request for a GroupManager. Raises `ResourceError`."""
        workers = least_of(num_workers)
        bounds = None if isinstance(num_workers, int) else num_workers
        if bounds is not None and self.placement != "own":
            raise ResourceError(
                f"num_workers={bounds} needs placement='own': a gang that grows reserves its CPUs"
            )
        return GangRequest(
            workers=workers,
            threads=self.threads,
            cpus=self.cpus,
            launcher=self.launcher,
            start_timeout_s=self.start_timeout_s,
            inherited=None if self.placement == "own" else self._given(workers),
            session=session,
            settings=settings() | log_settings(os.environ),
            strategy=self.strategy,
            lifetime=self.lifetime,
            owner=self.owner,
            max_failures=self.max_failures,
            checkpoint_folder=self.checkpoint_folder,
            bounds=bounds,
            after=after,
        )

    def _given(self, workers: int) -> Reservation:
        """CPUs that the caller has reserved. Raises `ResourceError` if they are too few."""
        if not isinstance(self.placement, Reservation):
            return inherited(workers, self.cpus)
        return self.placement.of(workers)


def least_of(workers: Workers) -> int:
    """The number of workers, or the fewest."""
    return workers if isinstance(workers, int) else workers[0]


def most_of(workers: Workers) -> int:
    """The number of workers, or the most."""
    return workers if isinstance(workers, int) else workers[1]


def _folder(path: str | os.PathLike[str]) -> str:
    folder = str(checked_path("checkpoint_folder", path, ValueError))
    if "://" in str(path):
        raise ValueError(f"checkpoint_folder={path!r}: it must be a folder, not a URL")
    return folder
