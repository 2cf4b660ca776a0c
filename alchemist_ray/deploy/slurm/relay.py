"""srun (or PALS, ALPS) for processes in an image: the supervisor outside runs it for them.

An image has no srun that fits the machine's Slurm. So a gang's launcher in it calls

    python3 -m alchemist_ray.deploy.slurm.relay srun --overlap ...

which hands command, environment and its own output to the supervisor of the node, through a
Unix socket in the node's folder (only this user can go there). If the caller goes, the step goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

VARIABLE = "ALCHEMIST_RELAY"  # path of the socket
LEAVE_S = 4.0  # for a step to end when it is told to
POLL_INTERVAL_S = 0.1
OUTSIDE = ("PATH", "HOME", "USER")  # the caller's are of the image
LIMIT = 16 << 20  # 16 MiB of command and environment
NO_PROGRAM = 127


class Relay:
    """The side outside: runs what callers ask for, each in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError, ValueError, KeyError):
            caller.sendall(json.dumps(_run(caller)).encode())


def _run(caller: socket.socket) -> int:
    """Run one command for a caller; its exit code, as a shell would tell it."""
    text, fds = b"", list[int]()
    try:
        while not text.endswith(b"\n"):
            data, more, _, _ = socket.recv_fds(caller, LIMIT, 2)
            text, fds = text + data, fds + more
            if not data or len(text) > LIMIT:
                raise ValueError("no whole command")
        asked = json.loads(text)
        env = asked["env"] | {name: os.environ[name] for name in OUTSIDE if name in os.environ}
        out, err = fds
        if shutil.which(asked["argv"][0]) is None:
            os.write(err, f"no program {asked['argv'][0]} on {os.uname().nodename}\n".encode())
            return NO_PROGRAM
        step = subprocess.Popen(
            asked["argv"], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
    finally:
        for fd in fds:
            os.close(fd)
    while step.poll() is None:
        if select.select([caller], [], [], POLL_INTERVAL_S)[0]:  # it is going, or gone
            step.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(LEAVE_S)
            step.kill()
            step.wait()
    code = step.returncode
    return 128 - code if code < 0 else code


def main(argv: list[str]) -> int:
    """The side inside: have a command run outside, and end as it does."""
    path = os.environ.get(VARIABLE)
    if not path:
        print(f"{VARIABLE} is not set: is this in a job's image?", file=sys.stderr)
        return NO_PROGRAM
    with socket.socket(socket.AF_UNIX) as supervisor:
        try:
            supervisor.connect(path)
        except OSError as error:
            print(f"no supervisor at {path} ({VARIABLE}): {error.strerror}", file=sys.stderr)
            return NO_PROGRAM

        def leave(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(OSError):
                supervisor.shutdown(socket.SHUT_WR)  # and wait until the step is gone

        signal.signal(signal.SIGTERM, leave)
        asked = json.dumps({"argv": argv, "env": dict(os.environ)}).encode() + b"\n"
        sent = socket.send_fds(supervisor, [asked], [1, 2])
        supervisor.sendall(asked[sent:])
        told = supervisor.makefile().read()
    return int(json.loads(told)) if told else NO_PROGRAM


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
