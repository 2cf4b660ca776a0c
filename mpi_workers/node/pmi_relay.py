"""Between a rank that srun has started and Slurm's PMI-1: values short enough for it.

MPICH cuts what ranks tell each other in MPI_Init into values as long as the server says it takes.
Slurm says 1024 bytes, and then reads no more than 1024 of a request, with the command around the
value (``handle_pmi1_cmd`` of its plugin pmi2; a "TODO" since 2011). MPICH 5 sends 4096 bytes of a
UCX address, and of whatever memory stands behind it, as hexadecimal digits with zeros left out: on
a node with several network interfaces that is always too long, elsewhere now and then. So a small
process passes everything on, and changes that one number.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Mapping

from mpi_workers.node.process_control import close_all_but

MAXES = b"cmd=maxes"
SAID, FITTING = b"vallen_max=1024", b"vallen_max=900"
READ_BYTES = 64 << 10


def is_slurms(env: Mapping[str, str]) -> bool:
    """Whether the PMI of this process is that of a step of Slurm's, plugin pmi2."""
    step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    return "PMI_FD" in env and env.get("PMI_JOBID") == step


def start_if_needed() -> None:
    """Start the relay, if this process needs one. To be called before MPI_Init."""
    if not is_slurms(os.environ):
        return
    slurm = socket.socket(fileno=int(os.environ["PMI_FD"]))
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the rank, by end of file
                signal.signal(number, signal.SIG_IGN)
            close_all_but(slurm.fileno(), ours.fileno())
            pass_on(ours, slurm)
        finally:
            os._exit(0)
    slurm.close()
    ours.close()
    os.environ["PMI_FD"] = str(theirs.detach())


def pass_on(rank: socket.socket, slurm: socket.socket) -> None:
    """Pass on all that is said, until either has gone."""
    other = {rank: slurm, slurm: rank}
    while True:
        for source in select.select(list(other), [], [])[0]:
            try:
                data = source.recv(READ_BYTES)
                if not data:
                    return
                if source is slurm and data.startswith(MAXES):
                    data = data.replace(SAID, FITTING)
                other[source].sendall(data)
            except OSError:
                return
