"""Worker processes of Ray, forked from a process that has imported what Ray imports.

A worker takes 0.55 s of CPU to start, half of it for packages that Ray imports, and 1 s with a
runtime environment, where two programs import them; forked it takes 0.25. Ray has a parameter for
the program that sets up each worker, which is `warm_worker` here: it gives arguments, environment
and streams to `_serve`. What is forked there imports Ray itself, which reads its environment once,
and runs Ray's own program.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from mpi_workers.node.processes import fork
from tests.support import commands, warm_worker

PACKAGES = (
    "asyncio", "filelock", "google.protobuf.json_format", "jsonschema", "msgpack", "numpy",
    "packaging.version", "pdb", "psutil", "requests", "tqdm.auto", "uvloop", "yaml",
)  # fmt: skip
OF_RLLIB = ("gymnasium", "scipy.signal", "torch")  # 2 s of CPU for each of its workers
ORDER_LIMIT = 1 << 18  # bytes
END_LIMIT_S = 10.0


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Start the server; a Ray that this process starts forks its workers until the end."""
    from ray._private import parameter  # noqa: PLC0415 - most tests need no Ray

    path = f"{tempfile.gettempdir()}/workers"
    program = f"{os.path.dirname(parameter.__file__)}/workers/setup_worker.py"
    os.environ[warm_worker.SERVER] = f"{path}:{program}"
    private = cast(Any, parameter)
    params = private.RayParams
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_workers", str(listener.fileno())],
            stdin=subprocess.PIPE, pass_fds=[listener.fileno()], cwd=commands.ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # as Ray sets it for workers
        )  # fmt: skip
    private.RayParams = partial(
        params, setup_worker_path=warm_worker.__file__, include_log_monitor=False
    )
    try:
        yield
    finally:
        private.RayParams = params
        del os.environ[warm_worker.SERVER]
        os.unlink(path)
        server.communicate(timeout=END_LIMIT_S)  # closes its standard input
        assert server.returncode == 0, "the server of workers has failed"


def import_for_rllib() -> None:
    """Have the server import what RLlib's workers do, before it forks the next worker."""
    address = os.environ[warm_worker.SERVER].partition(":")[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.settimeout(END_LIMIT_S)
        server.connect(address)
        server.send(json.dumps(OF_RLLIB).encode())


def _serve(listener: socket.socket) -> None:
    """Fork a process for each order, until standard input is closed; or import what is asked."""
    for package in PACKAGES:
        importlib.import_module(package)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what has ended
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        with listener.accept()[0] as sender:
            sender.settimeout(END_LIMIT_S)
            order, streams, _, _ = socket.recv_fds(sender, ORDER_LIMIT, 3)
        if streams:
            fork(partial(_work, streams, *json.loads(order)), *streams)
            for stream in streams:
                os.close(stream)
        elif order:  # empty: the sender has ended
            for package in json.loads(order):
                with contextlib.suppress(ImportError):  # tests that need it skip
                    importlib.import_module(package)


def _work(streams: list[int], argv: list[str], env: dict[str, str], cwd: str) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv, sys.path[0] = argv, os.path.dirname(argv[0])
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
