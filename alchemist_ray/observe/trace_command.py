"""``alchemist trace``: a timeline of the last commands of a gang's ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from alchemist_ray.errors import AlchemistError
from alchemist_ray.observe.trace import EARLIER_S
from alchemist_ray.runtime.cluster.ray_cluster import join_ray
from alchemist_ray.session import AlchemistSession
from alchemist_ray.subcommands import positive


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist trace``. Returns 0. Raises `AlchemistError`."""
    asked = _parser().parse_args(argv[1:])
    join_ray(None, start=False)
    session = AlchemistSession.attach(asked.name)
    try:
        path = session.trace(asked.out or f"{asked.name}.json", last_s=asked.last)
    except OSError as error:
        raise AlchemistError(f"the trace cannot be written: {error}") from error
    finally:
        session.detach()
    sys.stdout.write(f"{path}: open it at https://ui.perfetto.dev or in chrome://tracing\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist trace",
        description="Write the last commands of every rank of a gang, with their time in MPI, in "
        "Chrome's trace format. It is a call of the gang, and waits for its turn.",
        epilog="The Ray cluster is that of RAY_ADDRESS, or the one on this machine.",
    )
    parser.add_argument("name", help="name of the gang, as in `alchemist status`")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: NAME.json)")
    parser.add_argument(
        "--last",
        type=positive,
        default=EARLIER_S,
        metavar="SECONDS",
        help=f"only commands of the last SECONDS (default: {EARLIER_S:.0f})",
    )
    return parser
