"""Programs of the doctor's tests on a host of `tests.faults.hosts`."""

from __future__ import annotations

import os
from typing import Any

from alchemist_ray.observe.doctor.finding import NOTHING
from alchemist_ray.observe.doctor.probe import Probe

probe = Probe(os.uname().nodename)


def open_listener(towards: str) -> tuple[str, int]:
    """Open this host's listener; where it is."""
    return probe.listen(NOTHING, [towards])


def dial(listeners: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
    """Go to the others' listeners."""
    return probe.dial(listeners, limit_s)
