"""``python -m ali``: what the author of a library needs on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ali import scaffold


def main(argv: list[str]) -> int:
    """Run a subcommand; its exit code (2 for wrong usage, 1 for what cannot be done)."""
    parser = argparse.ArgumentParser(prog="alchemist")
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new-library", help="write a small library with build and test")
    new.add_argument("name", help="a lower-case identifier; the folder has the same name")
    new.add_argument("--language", choices=list(scaffold.LANGUAGES), default="c")
    new.add_argument("--folder", default=".", type=Path, help="where to make it (default: here)")
    commands.add_parser("include", help="print the folder of alchemist.h")
    for compiler in ("mpicc", "mpicxx"):
        commands.add_parser(compiler, help=f"print the path of the {compiler} to build with")
    commands.add_parser("mpi", help="print which MPI is found, as JSON")
    options = parser.parse_args(argv)
    try:
        match options.command:
            case "new-library":
                folder = scaffold.new_library(options.name, options.language, options.folder)
                print(f"{folder} is there; what to do next is in {folder / 'README.md'}")
            case "include":
                print(scaffold.include_directory())
            case "mpi":
                print(json.dumps(_mpi()), flush=True)
            case compiler:
                print(scaffold.mpi_compiler(compiler))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        print(f"alchemist: {error}", file=sys.stderr)
        return 1
    return 0


def _mpi() -> dict[str, Any]:
    """Which MPI mpi4py loads here. On a login node it may not be initialised."""
    import mpi4py  # noqa: PLC0415

    mpi4py.rc.initialize = False

    from ali.hpc import identity  # noqa: PLC0415

    return dict(identity.in_this_process())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
