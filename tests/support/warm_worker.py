"""The program that Ray runs for each worker in tests: it has `warm_workers` fork one."""

import argparse
import json
import os
import socket
import sys
from contextlib import suppress
from typing import Any

SERVER = "ALCHEMIST_TEST_WORKERS"  # variable of a Ray: its server's address, and Ray's own program
CONTEXT = "--serialized-runtime-env-context="
READ_AT_START = ("LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")  # names of variables begin with them


def can_be_forked(context: dict[str, Any]) -> bool:
    """Whether an environment differs only by variables that a running process can get."""
    if context.get("py_executable", sys.executable) != sys.executable:
        return False
    if any(value for key, value in context.items() if key not in {"env_vars", "py_executable"}):
        return False
    variables = context.get("env_vars", {})
    return not any(name.startswith(READ_AT_START) for name in variables) and not any(
        "$" in value for value in variables.values()
    )


if __name__ == "__main__":
    address, setup = os.environ[SERVER].split(":")
    given = argparse.ArgumentParser()
    given.add_argument("--serialized-runtime-env-context", default="{}")
    given.add_argument("--language")
    about, words = given.parse_known_args()
    context = json.loads(about.serialized_runtime_env_context)
    if about.language == "PYTHON" and can_be_forked(context):
        env = {**os.environ, **context.get("env_vars", {})}
        order = json.dumps([words, env, os.getcwd()]).encode()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(address)
            socket.send_fds(server, [order], [0, 1, 2])
            sys.exit()
    os.execv(sys.executable, [sys.executable, setup, *sys.argv[1:]])
