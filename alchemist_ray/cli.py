"""The command ``alchemist``."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import sys

from alchemist_ray.errors import AlchemistError
from alchemist_ray.version import __version__

# Subcommands, in the order of the help: the module that has its `main`, and the help text.
SUBCOMMANDS = {
    "demo": (
        "alchemist_ray.demo",
        "run an example: send an array, compute on MPI ranks, draw a picture",
    ),
    "status": ("alchemist_ray.observe.status", "list the gangs of the Ray cluster"),
    "stop": ("alchemist_ray.observe.status", "end a gang, for all its attached processes"),
    "cancel": ("alchemist_ray.observe.status", "cancel the calls of a gang; its matrices stay"),
    "logs": (
        "alchemist_ray.observe.status",
        "print what the ranks of a gang have printed, and its manager's log, also after its end",
    ),
    "trace": (
        "alchemist_ray.observe.status",
        "write the last commands of the ranks of a gang, and their time in MPI, as a timeline",
    ),
    "doctor": ("alchemist_ray.observe.doctor.cli", "check every node for common MPI problems"),
    "bench": ("alchemist_ray.observe.bench", "run a small HPC benchmark on a gang"),
    "slurm": ("alchemist_ray.deploy.slurm.cli", "run Ray and gangs in a Slurm job"),
    "pbs": ("alchemist_ray.deploy.slurm.cli", "run Ray and gangs in a PBS job"),
    "virtual-cluster": ("alchemist_ray.deploy.virtual_cluster.cli", "run Ray in virtual machines"),
    "gateway": ("alchemist_ray.gateway.server.actor", "start the endpoint for clients without Ray"),
    "token": (
        "alchemist_ray.gateway.server.actor",
        "create, list and revoke tokens of the gateway's users",
    ),
    "new-library": ("ali", "create a library in C, C++, Fortran or Python, with its test"),
    "run-routine": ("ali", "run a routine on MPI ranks without Ray, e.g. under a profiler"),
    "include": ("ali", "print the folder of alchemist.h"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit code (2 for wrong usage, 1 for an error of the tree)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in SUBCOMMANDS:
        return _usage(argv)
    module = SUBCOMMANDS[argv[0]][0]
    try:
        if module == "ali":  # a process of its own: alchemist_ray must not import ali (needs MPI)
            os.execv(sys.executable, [sys.executable, "-m", "ali", *argv])  # signals arrive there
        code = int(importlib.import_module(module).main(argv))
        sys.stdout.flush()
    except AlchemistError as error:
        sys.stderr.write(f"alchemist: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _output_is_unread():
            raise
        return 128 + signal.SIGPIPE
    return code


def _output_is_unread() -> bool:
    """Whether stdout's reader has gone (``alchemist logs NAME | head``); then it is given up."""
    poller = select.poll()
    poller.register(sys.stdout, 0)  # asks for errors only
    if not poller.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    return True


def _usage(argv: list[str]) -> int:
    """Print the help or the version; exit with code 2 for other words."""
    parser = argparse.ArgumentParser(
        prog="alchemist", description="Alchemist on Ray: call MPI libraries from Python."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in SUBCOMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    parser.parse_args(argv)
    return 2


if __name__ == "__main__":
    sys.exit(main())
