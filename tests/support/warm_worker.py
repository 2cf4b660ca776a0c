"""The program with which Ray sets up each worker in tests: it has `warm_workers` fork Python's."""

import argparse
import json
import os
import socket
import sys
from contextlib import suppress
from typing import Any

SERVER = "ALCHEMIST_TEST_WORKERS"  # variable of a Ray: its server's address, and Ray's own set-up
LIMIT_S = 10.0  # to give an order to the server
READ_AT_START = ("LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")  # names of variables begin with them


def can_be_forked(context: dict[str, Any]) -> bool:
    """Whether an environment differs only by variables that a running process can get."""
    more = {key: value for key, value in context.items() if value and key != "env_vars"}
    return more in ({}, {"py_executable": sys.executable}) and not any(
        name.startswith(READ_AT_START) or "$" in value  # Ray replaces other variables in it
        for name, value in context.get("env_vars", {}).items()
    )


if __name__ == "__main__":
    address, setup = os.environ[SERVER].split(":")
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    about, words = parser.parse_known_args()
    context = json.loads(about.serialized_runtime_env_context)
    if about.language == "PYTHON" and can_be_forked(context):
        env = {**os.environ, **context.get("env_vars", {})}
        order = json.dumps([words, env, os.getcwd()]).encode()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.settimeout(LIMIT_S)
            server.connect(address)
            socket.send_fds(server, [order], [0, 1, 2])
            sys.exit()
    os.execv(sys.executable, [sys.executable, setup, *sys.argv[1:]])
