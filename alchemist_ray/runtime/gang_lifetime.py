"""GangLifetime: how a gang is named, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from alchemist_ray.runtime.names import checked_gang_name

PROCESS, DETACHED = "process", "detached"
DETACHED_GRACE_S = 60.0  # how long a process may be disconnected and keep its leases


@dataclass(frozen=True, slots=True)
class GangLifetime:
    """How long a gang lives; see `AlchemistSession`.

    Attributes
    ----------
    name : str, optional
    detached : bool
        Whether it outlives the process that started it.
    idle_timeout_s : float, optional
        It ends after this many seconds without a command.
    """

    name: str | None = None
    detached: bool = False
    idle_timeout_s: float | None = None

    @property
    def lease_grace_s(self) -> float:
        """Seconds for which a process that lost its connection keeps its matrices."""
        return DETACHED_GRACE_S if self.detached else 0.0

    @classmethod
    def checked(cls, name: str | None, lifetime: str, idle_timeout_s: float | None) -> GangLifetime:
        """Options as the user gave them. Raises `ValueError`, `SessionError` for the name."""
        if lifetime not in (PROCESS, DETACHED):
            raise ValueError(f"lifetime must be '{PROCESS}' or '{DETACHED}'; got {lifetime!r}")
        if name is not None:
            name = checked_gang_name(name)
        elif lifetime == DETACHED:
            raise ValueError(
                f"lifetime='{DETACHED}' requires name=, by which other programs attach"
            )
        if idle_timeout_s is not None:
            valid = isinstance(idle_timeout_s, int | float) and not isinstance(idle_timeout_s, bool)
            if not valid or not 0 < idle_timeout_s < math.inf:
                raise ValueError(
                    f"idle_timeout_s must be a number greater than 0; got {idle_timeout_s!r}"
                )
        return cls(name, lifetime == DETACHED, idle_timeout_s)


PRIVATE = GangLifetime()
