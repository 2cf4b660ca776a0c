"""Resident memory, descriptors and threads of the processes of a run, and its files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from alchemist_ray.attached.address import this_process
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.ray_access import manager_pool
from tests.faults.conftest import agent_pids, pid_of
from tests.support import traces

# Allowed between the first and the last measurement. Memory: allocators keep what they had at
# their peak; measured over 500 sessions the program keeps 16 KB and the GroupManager 9 KB each.
# Descriptors: gRPC opens eight or nine in a GroupManager when calls meet for the first time, and no
# more of them in 600 runs than in 200.
LIMITS = {"MB": 96.0, "descriptors": 16, "threads": 8, "files": 2}


@dataclass(slots=True)
class Report:
    """Measurements before and after."""

    before: dict[str, dict[str, float]]
    after: dict[str, dict[str, float]] = field(default_factory=dict)


def held() -> dict[str, dict[str, float]]:
    """Measurements of the permanent processes, and the number of files of the run."""
    found = {"program": _process(os.getpid())}
    spare = manager_pool.take(this_process())
    pids = {
        **agent_pids(),
        "Driver": pid_of(find_driver()),
        "GroupManager": pid_of(spare.actor),
        **_rays_own(),
    }
    found |= {name: _process(pid) for name, pid in pids.items()}
    spare.give_up(reusable=True)
    gangs = len(list(Path(tempfile.gettempdir()).glob("alchemist-g*")))
    found["files"] = {"files": gangs + len(traces.shared_memory())}
    return found


def _rays_own() -> dict[str, int]:
    """Process ids of the Ray that this program has started."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/comm"):
        pid = int(status.parent.name)
        with contextlib.suppress(OSError):
            name = status.read_text().strip()
            if name in ("gcs_server", "raylet") and traces.parent_of(pid) == os.getpid():
                found[name] = pid
    return found


def _process(pid: int) -> dict[str, float]:
    return {
        "MB": traces.memory(pid) / (1 << 20),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


def excess(report: Report) -> list[str]:
    """The measurements that have grown beyond their limit."""
    return [
        f"{process}: {what} {report.before[process][what]:.0f} -> {value:.0f}"
        for process, values in report.after.items()
        for what, value in values.items()
        if value - report.before[process][what] > LIMITS[what]
    ]


def table(report: Report) -> str:
    """Before and after, for people."""
    lines = [f"{'process':<14} {'MB':>15} {'descriptors':>15} {'threads':>15} {'files':>9}"]
    for process, after in report.after.items():
        before = report.before[process]
        cells = [
            f"{before[what]:.0f} -> {after[what]:.0f}" if what in after else "" for what in LIMITS
        ]
        lines.append(f"{process:<14} {cells[0]:>15} {cells[1]:>15} {cells[2]:>15} {cells[3]:>9}")
    return "\n".join([*lines, *(f"GROWN {what}" for what in excess(report))])
