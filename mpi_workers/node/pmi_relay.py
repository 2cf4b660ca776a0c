"""A relay between a rank that srun has started and Slurm's PMI-1 server, which truncates requests.

In MPI_Init, MPICH cuts the data that ranks exchange into values of the length that the server
announces. Slurm announces 1024 bytes, but reads no more than 1024 bytes of a whole request, with
the command around the value (``handle_pmi1_cmd`` of its plugin pmi2; marked "TODO" since 2011).
MPICH 5 sends 4096 bytes, a UCX address and the memory behind it, as hexadecimal digits without
zeros: on a node with several network interfaces that is always too long, on others sometimes. The
relay is a small process that passes all data on and replaces that one number.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Mapping

from mpi_workers.node.processes import close_all_but

MAXES = b"cmd=maxes"
ANNOUNCED, USABLE = b"vallen_max=1024", b"vallen_max=900"
READ_BYTES = 64 << 10


def is_slurms(env: Mapping[str, str]) -> bool:
    """Whether the PMI server of this process is Slurm's plugin pmi2."""
    step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    return "PMI_FD" in env and env.get("PMI_JOBID") == step


def start_if_needed() -> None:
    """Start the relay if this process needs one. Call it before MPI_Init."""
    if not is_slurms(os.environ):
        return
    slurm = socket.socket(fileno=int(os.environ["PMI_FD"]))
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the rank, at end of file
                signal.signal(number, signal.SIG_IGN)
            close_all_but(slurm.fileno(), ours.fileno())
            pass_on(ours, slurm)
        finally:
            os._exit(0)
    slurm.close()
    ours.close()
    os.environ["PMI_FD"] = str(theirs.detach())


def pass_on(rank: socket.socket, slurm: socket.socket) -> None:
    """Pass on all data until one side closes its socket."""
    other = {rank: slurm, slurm: rank}
    while True:
        for source in select.select(list(other), [], [])[0]:
            try:
                data = source.recv(READ_BYTES)
                if not data:
                    return
                if source is slurm and data.startswith(MAXES):
                    data = data.replace(ANNOUNCED, USABLE)
                other[source].sendall(data)
            except OSError:
                return
