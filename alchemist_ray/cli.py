"""The command ``alchemist``."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys

from alchemist_ray.deploy.kubernetes import cli as kuberay
from alchemist_ray.errors import AlchemistError
from alchemist_ray.version import __version__

FOR_AUTHORS = {
    "new-library": "create a library in C, C++ or Python, with its build and test",
    "include": "print the folder of alchemist.h",
}

# Commands with a parser of their own: the module that has its `main`, and the help text.
OWN_PARSERS = {
    "bench": ("alchemist_ray.observe.bench.cli", "run a small HPC benchmark on a gang"),
    "doctor": ("alchemist_ray.observe.doctor.cli", "check every node for common MPI problems"),
    "virtual-cluster": ("alchemist_ray.deploy.virtual_cluster.cli", "run Ray in virtual machines"),
}

GATEWAY = {
    "gateway": "start the endpoint for clients without Ray",
    "token": "create, list and revoke tokens of the gateway's users",
}

GANGS = {
    "status": "list the gangs of the Ray cluster",
    "stop": "end a gang",
    "cancel": "cancel the calls of a gang",
}

LOGS = {"logs": "print the output of a gang's ranks, and its manager's log"}

BATCH = {"slurm": "Slurm", "pbs": "PBS"}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit code (2 for wrong usage, 1 for an error of the tree)."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="alchemist", description="Alchemist on Ray")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="run an example: send an array, compute on MPI ranks, draw a picture"
    )
    demo.add_argument("--workers", type=int, default=4, help="MPI ranks (default: 4)")
    demo.add_argument("--out", default="out", help="folder for the picture (default: out)")
    for name, what in FOR_AUTHORS.items():
        commands.add_parser(name, help=what, add_help=False)
    kuberay.add_parser(commands)
    for name, (_, what) in OWN_PARSERS.items():
        commands.add_parser(name, help=what, add_help=False)
    for name, what in (GANGS | LOGS | GATEWAY).items():
        commands.add_parser(name, help=what, add_help=False)
    for name, system in BATCH.items():
        commands.add_parser(name, help=f"run Ray and gangs in a {system} job", add_help=False)
    if argv and argv[0] in BATCH:
        from alchemist_ray.deploy.slurm import cli as jobs  # noqa: PLC0415

        return jobs.main(argv)
    if argv and argv[0] in GANGS:
        from alchemist_ray.observe import status  # noqa: PLC0415

        return status.main(argv)
    if argv and argv[0] in LOGS:
        from alchemist_ray.observe import logs_command  # noqa: PLC0415

        return logs_command.main(argv[1:])
    if argv and argv[0] in GATEWAY:
        module = importlib.import_module("alchemist_ray.gateway.server.cli")
        return int(module.main(argv))
    if argv and argv[0] in OWN_PARSERS:
        module = importlib.import_module(OWN_PARSERS[argv[0]][0])
        return int(module.main(argv[1:]))
    options, rest = parser.parse_known_args(argv)
    if options.command in FOR_AUTHORS:
        # In a process of its own: alchemist_ray must not import ali, which needs MPI.
        return subprocess.call([sys.executable, "-m", "ali", *argv])
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "kuberay":
        return kuberay.run(options)
    from alchemist_ray.demo import run  # noqa: PLC0415  (only the demo needs its packages)

    try:
        run(workers=options.workers, out=options.out)
    except AlchemistError as error:
        print(f"alchemist: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
