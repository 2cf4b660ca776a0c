"""A warm interpreter that forks the ranks of local gangs: they import nothing, and start at once.

`local_gang` starts one for its process and its environment. For each gang it sends the gang's
folder, with two descriptors: where the ranks print, and a socket. The gang runs until its ranks
have ended, or until the other end of that socket is closed. Its exit code is sent there.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from mpi_workers.failures import describe_status
from mpi_workers.node.cleanup import SHM
from mpi_workers.node.processes import adopt_orphans, crowded, end_descendants, fork, set_waits
from mpi_workers.wire.pmi import PmiNode, process_mapping, segment_names

ORDER_FILE = "order.json"  # in the gang's folder
PATH_LIMIT = 4096  # bytes of a folder's name
RunRank = Callable[[list[str]], None]


def main(orders: socket.socket, run_rank: RunRank) -> None:
    """Fork a process for each gang, until the process that sends the orders has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends what waits for the gang
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what has ended
    while True:
        folder, descriptors, _, _ = socket.recv_fds(orders, PATH_LIMIT, 2)
        if not folder:
            return
        gang = partial(_run, run_rank, folder.decode(), *descriptors)
        fork(gang, *descriptors, farewell=None)
        for descriptor in descriptors:
            os.close(descriptor)


def _run(run_rank: RunRank, folder: str, output: int, owner: int) -> None:
    os.setsid()
    adopt_orphans()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    order = json.loads(Path(folder, ORDER_FILE).read_text())
    os.chdir(order["cwd"])
    os.sched_setaffinity(0, order["cores"])
    set_waits(crowded(order["ranks"]))
    gang = _Gang(order["ranks"], socket.socket(fileno=owner))
    gang.start(lambda: run_rank(order["argv"]))
    code = gang.serve()
    end_descendants()
    for name in segment_names(gang.job, 0):
        (SHM / name).unlink(missing_ok=True)  # of ranks that have failed in MPI_Init
    with suppress(OSError):  # its owner has ended
        gang.owner.send(bytes([code]))
    os._exit(0)


class _Gang:
    """What an mpiexec is to its ranks: PMI's server, which ends all of them if one fails."""

    def __init__(self, size: int, owner: socket.socket) -> None:
        self.owner = owner
        self.job = f"local_{os.getpid()}"
        self._size = size
        self._pids: list[int] = []
        self._sockets: list[socket.socket] = []
        self._said = [b""] * size  # the beginning of a line
        self._finalized: set[int] = set()
        self._failed = False
        self._pmi = PmiNode(
            self.job, size, list(range(size)), process_mapping([size]),
            send=self._send, barrier=lambda puts: self._pmi.release(puts), abort=self._abort,
            say=lambda rank, text: print(f"rank {rank}: {text}", flush=True),
        )  # fmt: skip

    def start(self, run_rank: Callable[[], None]) -> None:
        for rank in range(self._size):
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            connected = {"PMI_FD": theirs.fileno(), "PMI_RANK": rank, "PMI_SIZE": self._size}

            def run(connected: dict[str, int] = connected) -> None:
                os.environ.update({name: str(value) for name, value in connected.items()})
                signal.signal(signal.SIGINT, signal.default_int_handler)
                run_rank()

            self._pids.append(fork(run, theirs.fileno()))
            theirs.close()

    def serve(self) -> int:
        """Answer the ranks until all have ended, or one has failed: 0 or 1."""
        ends = {os.pidfd_open(pid): rank for rank, pid in enumerate(self._pids)}
        lines = {sock.fileno(): rank for rank, sock in enumerate(self._sockets)}
        wait = select.poll()
        for descriptor in (self.owner.fileno(), *lines, *ends):
            wait.register(descriptor, select.POLLIN)
        while ends and not self._failed:
            for descriptor, _ in wait.poll():
                if descriptor in lines:
                    if not self._receive(lines[descriptor]):
                        wait.unregister(descriptor)
                elif descriptor in ends:
                    wait.unregister(descriptor)
                    self._reap(ends.pop(descriptor))
                else:
                    self._failed = True  # its owner waits no longer
        return int(self._failed)

    def _receive(self, rank: int) -> bool:
        """Answer what a rank has sent; False at its end."""
        try:
            data = self._sockets[rank].recv(1 << 16)
        except ConnectionResetError:
            data = b""
        *lines, self._said[rank] = (self._said[rank] + data).split(b"\n")
        for line in lines:
            if line.startswith(b"cmd=finalize"):
                self._finalized.add(rank)
            self._pmi.line(rank, line.decode())
        return bool(data)

    def _send(self, rank: int, line: str) -> None:
        with suppress(OSError):  # it has ended
            self._sockets[rank].sendall(line.encode() + b"\n")

    def _abort(self, rank: int, code: int) -> None:
        print(f"rank {rank} called MPI_Abort with code {code}", flush=True)
        self._failed = True

    def _reap(self, rank: int) -> None:
        _, status = os.waitpid(self._pids[rank], 0)
        while self._receive(rank):
            pass
        if status or rank not in self._finalized:
            print(f"rank {rank} {describe_status(status)}", flush=True)
            self._failed = True
