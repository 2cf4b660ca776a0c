"""srun (or PALS, ALPS) for processes in an image: the supervisor runs it outside.

An image has no srun that fits the machine's Slurm. A gang's launcher in it therefore calls

    python3 -m alchemist_ray.deploy.slurm.relay srun --overlap ...

which passes command, environment and its own output to the supervisor of the node, through a Unix
socket in the node's folder (accessible to this user only). The step ends with the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from types import FrameType
from typing import Any

from alchemist_ray.deploy.slurm.signals import end, exit_code
from mpi_workers.wire.sockets import keep_listening

VARIABLE = "ALCHEMIST_RELAY"  # path of the socket
POLL_INTERVAL_S = 0.1
OUTSIDE = ("PATH", "HOME", "USER")  # the caller's values are the image's
LIMIT_NBYTES = 16 << 20  # of command and environment
NO_PROGRAM, NOT_STARTED = 127, 126


class Relay(socketserver.ThreadingUnixStreamServer):
    """The server outside the image: runs each caller's command in a thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: str) -> None:
        super().__init__(path, _Caller)
        threading.Thread(target=self.serve_forever, args=(POLL_INTERVAL_S,), daemon=True).start()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            keep_listening(error)
            raise  # the base waits for the next caller

    def close(self) -> None:
        """Accept no more callers."""
        self.shutdown()
        self.server_close()


class _Caller(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.request.sendall(json.dumps(_run(self.request)).encode())


def _run(caller: socket.socket) -> int:
    """Run a caller's command. Returns its exit code, as a shell reports it."""
    text = b""
    fds = list[int]()
    try:
        while not text.endswith(b"\n"):
            data, more, _, _ = socket.recv_fds(caller, LIMIT_NBYTES, 2)
            text, fds = text + data, fds + more
            if not data or len(text) > LIMIT_NBYTES:
                raise ValueError("incomplete command")
        asked = json.loads(text)
        env = asked["env"] | {name: os.environ[name] for name in OUTSIDE if name in os.environ}
        out, err = fds
        if shutil.which(asked["argv"][0]) is None:
            os.write(err, f"no program {asked['argv'][0]} on {os.uname().nodename}\n".encode())
            return NO_PROGRAM
        try:
            step = subprocess.Popen(
                asked["argv"], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.write(err, f"{asked['argv'][0]} on {os.uname().nodename}: {error}\n".encode())
            return NOT_STARTED
    finally:
        for fd in fds:
            os.close(fd)
    while step.poll() is None:
        if select.select([caller], [], [], POLL_INTERVAL_S)[0]:  # the caller ends, or has ended
            end(step, 0.0)
    return exit_code(step)


def main(argv: list[str]) -> int:
    """The client inside the image: run a command outside. Returns its exit code."""
    path = os.environ.get(VARIABLE)
    if not path:
        print(f"{VARIABLE} is not set: is this process in the image of a job?", file=sys.stderr)
        return NO_PROGRAM
    with socket.socket(socket.AF_UNIX) as supervisor:
        try:
            supervisor.connect(path)
        except OSError as error:
            print(f"no supervisor at {path} ({VARIABLE}): {error.strerror}", file=sys.stderr)
            return NO_PROGRAM

        def leave(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(OSError):
                supervisor.shutdown(socket.SHUT_WR)  # then wait for the step's end

        signal.signal(signal.SIGTERM, leave)
        asked = json.dumps({"argv": argv, "env": dict(os.environ)}).encode() + b"\n"
        sent = socket.send_fds(supervisor, [asked], [1, 2])
        if sent < len(asked):  # else the answer may have come, and the connection have ended
            supervisor.sendall(asked[sent:])
        told = supervisor.makefile().read()
    return int(json.loads(told)) if told else NO_PROGRAM


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
