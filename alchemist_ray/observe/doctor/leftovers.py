"""Shared memory left by killed jobs: it uses memory until it is removed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from alchemist_ray.observe.doctor.finding import OK, WARN, Expected, Finding
from alchemist_ray.plural import counted
from mpi_workers.matrix.sizes import readable

SHM = Path("/dev/shm")
MPICH = "mpich_"
# Segments of MPI libraries and Ray that remain when their processes are killed.
SEGMENTS = re.compile(
    rf"({MPICH}|cray-shared-mem|psm[23]?_|vader_segment|sm_segment|sem\.|plasma|ucx_)"
)
STALE_S = 60.0
SHOWN = 3
REMOVED = 50  # named in the advice


@dataclass(frozen=True, slots=True)
class Segment:
    """Shared memory with a name that no process here has open."""

    path: Path
    age_s: float
    nbytes: int


def unused() -> Iterator[Segment]:
    """Yield this user's segments of MPI libraries and Ray that no process has open."""
    candidates = []
    for path in SHM.iterdir():
        if SEGMENTS.match(path.name):
            try:
                candidates.append((path, path.stat()))
            except OSError:  # it has gone
                continue
    mapped = _mapped() if candidates else ""
    for path, about in candidates:
        if about.st_uid == os.geteuid() and str(path) not in mapped:
            yield Segment(path, time.time() - about.st_mtime, about.st_blocks * 512)


def stale(expected: Expected) -> Iterator[Finding]:
    """Check for segments of this user's ended jobs."""
    found = {s.path.name: s.nbytes for s in unused() if s.age_s > STALE_S}
    if not found:
        yield Finding("leftovers in /dev/shm", OK, "none of this user")
        return
    shown = ", ".join(sorted(found)[:SHOWN]) + (", ..." if len(found) > SHOWN else "")
    # By name: segments of ranks that run have the same prefixes.
    files = " ".join(f"{SHM}/{name}" for name in sorted(found)[:REMOVED])
    again = "; then ask again for the others" if len(found) > REMOVED else ""
    yield Finding(
        "leftovers in /dev/shm", WARN,
        f"{counted(len(found), 'segment')} that no process has open, "
        f"{readable(sum(found.values()))}: {shown}",
        f"`rm {files}`, unless a job of yours runs there in a container{again}",
    )  # fmt: skip


def remove_mpich(age_s: float) -> list[str]:
    """Remove MPICH's segments up to this age, of ranks just killed. Returns their names."""
    removed = []
    for segment in unused():
        if segment.path.name.startswith(MPICH) and segment.age_s <= age_s:
            segment.path.unlink(missing_ok=True)
            removed.append(segment.path.name)
    return removed


def _mapped() -> str:
    """Return all processes' mappings and open files in shared memory, as lines."""
    lines = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            lines += [m for m in (folder / "maps").read_text().splitlines() if str(SHM) in m]
            lines += [os.readlink(fd) for fd in (folder / "fd").iterdir()]
        except OSError:  # another user's, or it has ended
            continue
    return "\n".join(lines)
