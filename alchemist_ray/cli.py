"""The command ``alchemist``."""

from __future__ import annotations

import argparse
import sys

from alchemist_ray import __version__
from alchemist_ray.errors import AlchemistError


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit code (2 for wrong usage, 1 for an error of the tree)."""
    parser = argparse.ArgumentParser(prog="alchemist", description="Alchemist on Ray")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="show the whole way, from an array to a picture")
    demo.add_argument("--workers", type=int, default=4, help="MPI ranks (default: 4)")
    demo.add_argument("--out", default="out", help="folder for the picture (default: out)")
    options = parser.parse_args(argv)
    from alchemist_ray.demo import run  # noqa: PLC0415  (only the demo needs its packages)

    try:
        run(workers=options.workers, out=options.out)
    except AlchemistError as error:
        print(f"alchemist: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
