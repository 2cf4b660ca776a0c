"""What is asked of a gang's manager, and how to reach the gang that it has started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from alchemist_ray.runtime.placement import Reservation


@dataclass(frozen=True, slots=True)
class GangRequest:
    """What a session asks for."""

    workers: int
    threads: int
    cpus: float
    launcher: str
    start_timeout_s: float
    inherited: Reservation | None
    epoch: int
    session: str
    strategy: str = "PACK"
    settings: dict[str, str] = field(default_factory=dict)  # the caller's, for the launcher


@dataclass(frozen=True, slots=True)
class GangAddress:
    """How to reach a gang that is ready."""

    gang: str
    session: str
    epoch: int
    token: str
    addresses: tuple[str, ...]
    workers: tuple[dict[str, Any], ...]
