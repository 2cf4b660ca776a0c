"""Facts about each rank: the MPI library that it loaded, its host, its network."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

import psutil
from threadpoolctl import threadpool_info

from ali.interface import Context, routine
from ali.loader import mpi_file
from ali.mpi_family import is_open_mpi, our_mpi

# Device files of fabrics, which do not appear as TCP connections.
FABRICS = re.compile(r"/dev/(infiniband/uverbs|cxi|kgni|hfi1_|knem|xpmem)\w*")


@routine("ranks")
def about(ctx: Context) -> list[str]:
    """Facts about every rank, each as a JSON object.

    Returns
    -------
    ranks : list of str
        In rank order: `rank`, `size`, `host`, `pid`; `library` (the file of the loaded MPI),
        `version` (as MPI reports it), `family`; `threads` (of BLAS), `cores` (that the rank may
        run on); `addresses` (local addresses of its connections to ranks on other hosts) and
        `fabrics` (open device files).

    Notes
    -----
    Ranks exchange a message first, so that connections that MPI opens on first use exist.
    """
    comm = ctx.comm
    comm.alltoall([ctx.rank] * ctx.size)
    facts = {
        "rank": ctx.rank,
        "size": ctx.size,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        **in_this_process(),
        "threads": max((int(pool["num_threads"]) for pool in threadpool_info()), default=1),
        "cores": len(os.sched_getaffinity(0)),
        "addresses": sorted(_addresses()),
        "fabrics": sorted({found[1] for f in _open_files() if (found := FABRICS.match(f))}),
    }
    of_all_ranks: list[str] = comm.allgather(json.dumps(facts))
    return of_all_ranks


def family(library: str) -> str:
    """The ABI of a loaded MPI library: programs built for the same ABI can use it."""
    if is_open_mpi():
        return "Open MPI"
    return "standard MPI ABI" if "libmpi_abi" in Path(library).name else "MPICH ABI"


def in_this_process() -> dict[str, str]:
    """`library`, `version` and `family` of the MPI of this process, which need not be a rank.

    Does not initialise MPI.
    """
    return {"library": mpi_file(), "version": our_mpi(), "family": family(mpi_file())}


def _open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the folder itself
            found.append(os.readlink(entry))
    return found


def _addresses() -> set[str]:
    """Local IPv4 addresses of this process's connections to other hosts."""
    there = psutil.Process().net_connections("tcp4")
    up = (one for one in there if one.status == psutil.CONN_ESTABLISHED)
    return {one.laddr.ip for one in up if one.laddr.ip != one.raddr.ip}
