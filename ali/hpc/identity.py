"""What each rank says of itself: the MPI that it has loaded, its place, the way it talks."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from pathlib import Path

from threadpoolctl import threadpool_info

from ali.interface import Context, routine
from ali.mpi_family import is_open_mpi, mpi_file, our_mpi

ESTABLISHED = "01"
# Device files of fabrics that do not show as TCP connections.
FABRICS = re.compile(r"/dev/(infiniband/uverbs|cxi|kgni|hfi1_|knem|xpmem)\w*")


@routine("ranks")
def about(ctx: Context) -> list[str]:
    """What every rank says of itself, each as a JSON object.

    Returns
    -------
    ranks : list of str
        In rank order: `rank`, `size`, `host`, `pid`; `library` (the file of the MPI that is
        loaded), `version` (its own words), `family`; `threads` (of its BLAS), `cores` (that it may
        run on); `addresses` (its ends of connections to other hosts' ranks) and `fabrics`
        (device files that it has open).

    Notes
    -----
    Ranks exchange a message first, so that what is connected only when it is used shows.
    """
    comm = ctx.comm
    comm.alltoall([ctx.rank] * ctx.size)
    files = _open_files()
    told = {
        "rank": ctx.rank,
        "size": ctx.size,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "library": mpi_file(),
        "version": our_mpi(),
        "family": family(mpi_file()),
        "threads": max((int(pool["num_threads"]) for pool in threadpool_info()), default=1),
        "cores": len(os.sched_getaffinity(0)),
        "addresses": sorted(set(_addresses(files))),
        "fabrics": sorted({found[1] for f in files if (found := FABRICS.match(f))}),
    }
    everybody: list[str] = comm.allgather(json.dumps(told))
    return everybody


def family(library: str) -> str:
    """The ABI of an MPI library that is loaded: who else's programs can run on it."""
    if is_open_mpi():
        return "Open MPI"
    return "standard MPI ABI" if "libmpi_abi" in Path(library).name else "MPICH ABI"


def in_this_process() -> dict[str, str]:
    """What a process that is no rank finds when it imports mpi4py: `library`, `version`, `family`.

    Does not initialise MPI.
    """
    return {"library": mpi_file(), "version": our_mpi(), "family": family(mpi_file())}


def _open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:  # the one with which the folder was read
            continue
    return found


def _addresses(files: list[str]) -> list[str]:
    """Local IPv4 addresses of this process's connections to other hosts."""
    mine = {found[1] for f in files if (found := re.fullmatch(r"socket:\[(\d+)\]", f))}
    there = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = (_address(field) for field in fields[1:3])
        if fields[3] == ESTABLISHED and fields[9] in mine and local != remote:
            there.append(local)
    return there


def _address(field: str) -> str:
    """``0100007F:1F90`` is 127.0.0.1, as the kernel prints a word of network order."""
    return socket.inet_ntoa(struct.pack("=I", int(field.partition(":")[0], 16)))
