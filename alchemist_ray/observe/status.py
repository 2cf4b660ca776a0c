"""``alchemist status``, ``stop`` and ``cancel``: the gangs of a cluster, for operators."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from alchemist_ray.gang.info import GangInfo
from alchemist_ray.runtime.cluster import catalogue
from alchemist_ray.runtime.cluster.ray_cluster import join_ray
from alchemist_ray.subcommands import positive, sentence
from mpi_workers.matrix.sizes import readable

WATCH_S = 2.0
COLUMNS = ("gang", "state", "ranks", "nodes", "memory", "free", "used", "call", "owner")
HELP = {
    "status": "list the gangs of the Ray cluster",
    "stop": "end a gang, for all its attached processes",
    "cancel": "cancel the calls of a gang; its matrices stay",
}


def status() -> list[GangInfo]:
    """The gangs of this Ray cluster, with the free memory of their nodes.

    The same as `AlchemistSession.list`, which does not ask the nodes.

    Raises
    ------
    SessionError
        If this process is in no Ray cluster and finds none.
    """
    join_ray(None, start=False)
    return catalogue.list_gangs(memory=True)


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist status``, ``stop`` or ``cancel``. Returns 0."""
    asked = _parser(argv[0]).parse_args(argv[1:])
    if argv[0] == "status":
        with contextlib.suppress(KeyboardInterrupt):  # the end of --watch
            _show(asked)
    else:
        join_ray(None, start=False)
        {"stop": catalogue.stop, "cancel": catalogue.cancel}[argv[0]](asked.name)
    return 0


def _show(asked: argparse.Namespace) -> None:
    while True:
        found = status()
        entries = [asdict(gang) for gang in found]
        text = json.dumps(entries) + "\n" if asked.json else table(found)
        clear = "\x1b[H\x1b[2J" if asked.watch and sys.stdout.isatty() else ""
        sys.stdout.write(clear + text)
        sys.stdout.flush()
        if not asked.watch:
            return
        time.sleep(asked.watch)


def table(found: Sequence[GangInfo]) -> str:
    """The gangs as a table, a line for each."""
    if not found:
        return "no gangs\n"
    rows = [COLUMNS, *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines) + "\n"


def _row(gang: GangInfo) -> tuple[str, ...]:
    call = ""
    if gang.calls:
        queued = f" (+{len(gang.calls) - 1})" if len(gang.calls) > 1 else ""
        first = gang.calls[0]
        state = f" ({first.state})" if first.state not in ("running", "queued") else ""
        call = f"{first.name} {_age(first.age_s)}{state}{queued}"
    return (
        gang.name,
        gang.state if gang.detached else f"{gang.state} (private)",
        str(gang.workers),
        ",".join(gang.nodes),
        readable(gang.nbytes),
        "-" if gang.free_nbytes is None else readable(gang.free_nbytes),
        f"{_age(time.time() - gang.last_used)} ago" if gang.last_used else "-",
        call or "-",
        gang.owner or "-",
    )


def _age(seconds: float) -> str:
    """``12 s``, ``3 min``, ``5 h`` or ``2 d``."""
    seconds = max(0.0, seconds)
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"alchemist {command}",
        description=sentence(HELP[command]),
        epilog="The Ray cluster is that of RAY_ADDRESS, or the one on this machine.",
    )
    if command == "status":
        parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
        parser.add_argument(
            "--watch",
            nargs="?",
            type=positive,
            const=WATCH_S,
            metavar="SECONDS",
            help=f"repeat (default: every {WATCH_S:g} s) until Ctrl-C",
        )
    else:
        parser.add_argument("name", help="name of the gang, as in `alchemist status`")
    return parser
