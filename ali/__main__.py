"""``python -m ali``: commands for authors of libraries."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

import mpi4py

# Before anything imports mpi4py.MPI: no command here is a rank, and on a login node, or with a
# small /dev/shm, MPI_Init ends the process.
mpi4py.rc.initialize = False

from ali import scaffold, standalone  # noqa: E402
from ali.hpc import identity  # noqa: E402


def main(argv: list[str]) -> int:
    """Run a subcommand; its exit code (2 for wrong usage, 1 for an error)."""
    parser = argparse.ArgumentParser(prog="alchemist")
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser(
        "new-library",
        description="Create a library in C, C++, Fortran or Python, with its build and test.",
    )
    new.add_argument("name", help="name of the library and of its folder: a lower-case identifier")
    new.add_argument(
        "--language",
        choices=list(scaffold.LANGUAGES),
        default="c",
        help="language of the code (default: c)",
    )
    new.add_argument(
        "--simulator", action="store_true", help="a simulator for environments, with its test"
    )
    new.add_argument("--sparse", action="store_true", help="with routines of sparse matrices")
    new.add_argument(
        "--folder", default=".", type=Path, help="parent folder (default: the current folder)"
    )
    routine = commands.add_parser(
        "run-routine", description="Run one routine of a library on MPI ranks, without Ray."
    )
    standalone.add_options(routine)
    for command, text in (
        ("include", "Print the folder of alchemist.h."),
        ("mpicc", "Print the path of the gang's mpicc."),
        ("mpicxx", "Print the path of the gang's mpicxx."),
        ("mpi", "Print the MPI that is found, as JSON."),
    ):
        commands.add_parser(command, description=text)
    options = parser.parse_args(argv)
    try:
        match options.command:
            case "new-library":
                folder = scaffold.new_library(
                    options.name, options.language, options.folder,
                    simulator=options.simulator, sparse=options.sparse,
                )  # fmt: skip
                print(f"created {folder}; see {folder / 'README.md'}")
            case "run-routine":
                standalone.run(options)
            case "include":
                print(scaffold.include_directory())
            case "mpi":
                print(json.dumps(identity.in_this_process()), flush=True)
            case compiler:
                print(scaffold.mpi_compiler(compiler))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        print(f"alchemist: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
