"""What can be asked of a gang, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from alchemist_ray.endpoint import GangRequest
from alchemist_ray.errors import ResourceError
from alchemist_ray.launch import LAUNCHERS
from alchemist_ray.placement import PLACEMENTS, check_capacity, inherited


@dataclass(frozen=True, slots=True)
class GangOptions:
    """How a gang is placed and started; see `AlchemistSession`."""

    placement: str
    threads: int
    cpus: float
    launcher: str
    start_timeout_s: float

    @classmethod
    def checked(
        cls,
        placement: str,
        threads_per_worker: int,
        cpus_per_worker: float | None,
        launcher: str,
        start_timeout_s: float,
    ) -> GangOptions:
        """Options as the user gave them. Raises `ValueError`."""
        if placement not in PLACEMENTS:
            raise ValueError(f"placement={placement!r}: it is one of {', '.join(PLACEMENTS)}")
        if launcher not in LAUNCHERS:
            raise ValueError(f"launcher={launcher!r}: it is one of {', '.join(LAUNCHERS)}")
        positive_int("threads_per_worker", threads_per_worker)
        cpus = float(threads_per_worker if cpus_per_worker is None else cpus_per_worker)
        if cpus <= 0:
            raise ValueError(f"cpus_per_worker={cpus_per_worker}: it must be over 0")
        return cls(placement, threads_per_worker, cpus, launcher, start_timeout_s)

    def check_capacity(self, workers: int) -> None:
        """Whether the cluster could hold so many workers. Raises `ResourceError`."""
        if self.placement == "inherit":
            inherited(workers, self.cpus)
        else:
            check_capacity(workers, self.cpus)

    def request(self, workers: int, epoch: int, session: str) -> GangRequest:
        """What a GroupManager is asked for."""
        return GangRequest(
            workers=workers,
            threads=self.threads,
            cpus=self.cpus,
            launcher=self.launcher,
            start_timeout_s=self.start_timeout_s,
            inherited=inherited(workers, self.cpus) if self.placement == "inherit" else None,
            epoch=epoch,
            session=session,
        )


def positive_int(name: str, value: Any) -> None:
    """Raises `ResourceError` for a number of workers, else `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        kind = ResourceError if name == "num_workers" else ValueError
        raise kind(f"{name}={value!r}: it must be a whole number, at least 1")
