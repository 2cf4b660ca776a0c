"""``alchemist status``, ``stop``, ``cancel``, ``logs`` and ``trace``: gangs, for operators."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import ray
from ray.exceptions import RayError

from alchemist_ray.attached.info import GangInfo, user_of
from alchemist_ray.cli import SUBCOMMANDS
from alchemist_ray.cluster.actors import ask
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.cluster.ray_cluster import join_ray
from alchemist_ray.errors import AlchemistError, SessionError
from alchemist_ray.measures.logs import MANAGER, NodeLog
from alchemist_ray.plural import counted
from alchemist_ray.ray_access import catalogue
from alchemist_ray.session.alchemist_session import AlchemistSession
from alchemist_ray.session.trace import EARLIER_S
from alchemist_ray.subcommands import parser_of, positive, sentence
from mpi_workers.matrix.sizes import readable

WATCH_S = 2.0
FOLLOW_INTERVAL_S = 1.0
ANSWER_S = 30.0
LINES = 100
COLUMNS = ("gang", "state", "ranks", "nodes", "env", "memory", "free", "used", "call", "owner")


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
    """Run one of the commands. Returns 0. Raises `AlchemistError`."""
    asked = _parser(argv[0]).parse_args(argv[1:])
    join_ray(None, start=False)
    match argv[0]:
        case "status" | "logs":
            with contextlib.suppress(KeyboardInterrupt):  # the end of --watch and --follow
                (_show if argv[0] == "status" else _show_logs)(asked)
        case "stop":
            catalogue.stop(asked.name)
        case "cancel":
            catalogue.cancel(asked.name)
        case "trace":
            _trace(asked)
    return 0


def _trace(asked: argparse.Namespace) -> None:
    session = AlchemistSession.attach(asked.name)
    try:
        path = session.trace(asked.out or f"{asked.name}.json", last_s=asked.last)
    except OSError as error:
        raise AlchemistError(f"the trace cannot be written: {error}") from error
    finally:
        session.detach()
    sys.stdout.write(f"{path}: open it at https://ui.perfetto.dev or in chrome://tracing\n")


def _show_logs(asked: argparse.Namespace) -> None:
    log = GangLog(asked.name)
    lines = log.read(asked.rank)
    if log.folder is None:
        raise SessionError(
            f"no node of the Ray cluster has logs of a gang {asked.name!r}: `alchemist status` "
            "lists the names of the gangs"
        )
    if not lines and not asked.follow:
        source = "its ranks" if asked.rank is None else f"rank {asked.rank}"
        sys.stderr.write(f"alchemist: the log of {asked.name!r} has no lines of {source}\n")
    while True:
        for line in lines[-asked.lines :] if asked.lines else lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if not asked.follow:
            return
        time.sleep(FOLLOW_INTERVAL_S)
        asked.lines = 0
        lines = log.read(asked.rank)


class GangLog:
    """The log of a gang, read from all nodes.

    Attributes
    ----------
    folder : str or None
        Name of the newest gang of that name, once it is known.
    """

    def __init__(self, gang: str) -> None:
        self._gang = gang
        self._positions: dict[str, dict[str, int]] = {}
        self.folder: str | None = None

    def read(self, rank: int | None = None) -> list[str]:
        """New lines, each with its rank: ``2026-11-22 11:00:00.123 [3] out text``."""
        found: dict[str, NodeLog] = {}
        for node, answer in self._answers().items():
            try:
                log = ask(answer, ANSWER_S)
            except RayError as error:
                sys.stderr.write(f"alchemist: node {node} did not answer: {error}\n")
                continue
            if log is not None:
                found[node] = log
        if self.folder is None and found:
            self.folder = max(found.values(), key=lambda log: log.made).folder
        lines: list[tuple[str, str]] = []
        for node, log in found.items():
            if log.folder == self.folder:
                self._positions[node] = log.positions
                for file, own in log.lines.items():
                    if rank is None or file == f"rank{rank}.log":
                        lines += [(line[:23], _named(file, line)) for line in own]
        return [line for _, line in sorted(lines, key=lambda each: each[0])]

    def _answers(self) -> dict[str, Any]:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        agents = ask(find_driver().agents.remote([node["NodeID"] for node in nodes]), 4 * ANSWER_S)
        gang = self.folder or self._gang
        return {
            node["NodeManagerHostname"]: agent.log_lines.remote(
                gang, self._positions.get(node["NodeManagerHostname"], {})
            )
            for node, (agent, _) in zip(nodes, agents, strict=True)
        }


def _named(file: str, line: str) -> str:
    name = "manager" if file == MANAGER else file.removeprefix("rank").removesuffix(".log")
    return f"{line[:23]} [{name}]{line[23:]}" if line[:1].isdigit() else f"[{name}] {line}"


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
    renewed = (
        f"{gang.name}: its ranks were started again {counted(gang.renewals, 'time')}; the last "
        f"time {gang.last_loss}"
        for gang in found
        if gang.renewals
    )
    return "\n".join([*lines, *renewed, *chain.from_iterable(map(_by_user, found))]) + "\n"


def _by_user(gang: GangInfo) -> Iterator[str]:
    """The calls of a gang, a line for each user."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for call in gang.calls:
        counts[user_of(call.caller)][call.state] += 1
    for user, ended in gang.ended_calls.items():
        counts[user] += Counter(ended)
    for user, states in counts.items():
        told = ", ".join(f"{count} {state}" for state, count in states.items())
        yield f"{gang.name}: calls of {user or '.remote'}: {told}"


def _row(gang: GangInfo) -> tuple[str, ...]:
    call = ""
    if gang.calls:
        queued = f" (+{len(gang.calls) - 1})" if len(gang.calls) > 1 else ""
        first = gang.calls[0]
        state = f" ({first.state})" if first.state not in ("running", "queued") else ""
        call = f"{first.name} {_age(first.age_s)}{state}{queued}"
    gpus = gang.gpus_per_worker
    return (
        gang.name,
        gang.state if gang.detached else f"{gang.state} (private)",
        str(gang.workers) + f" ({gang.workers * gang.gpus_per_worker:g} GPUs)" * (gpus > 0),
        ",".join(gang.nodes),
        ",".join(gang.env) or "-",
        readable(gang.nbytes),
        "-" if gang.free_nbytes is None else readable(gang.free_nbytes),
        f"{_age(time.time() - gang.last_used)} ago" if gang.last_used else "-",
        call or "-",
        _owner(gang),
    )


def _owner(gang: GangInfo) -> str:
    """The user who has started it: the process of a detached gang may have ended long ago."""
    process = "(pid " in gang.owner  # else a user of a gateway
    gone = gang.detached and process and gang.owner not in gang.processes
    return (gang.owner or "-") + ", not attached" * gone


def _age(seconds: float) -> str:
    """``12 s``, ``3 min``, ``5 h`` or ``2 d``."""
    seconds = max(0.0, seconds)
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


OPTIONS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "status": (
        ("--json", False, "print JSON, sizes in bytes"),
        ("--watch SECONDS", positive, "repeat (default: every %(const)s s) until Ctrl-C",
         {"nargs": "?", "const": WATCH_S}),
    ),
    "logs": (
        ("--rank", int, "only the output of this rank"),
        ("--lines", LINES, "the last N lines (default: %(default)s; 0: all)"),
        ("--follow", False, "print new lines until Ctrl-C"),
    ),
    "trace": (
        ("--out FILE", str, "file to write (default: NAME.json)"),
        ("--last SECONDS", positive, "only commands of the last SECONDS (default: %(default).0f)",
         {"default": EARLIER_S}),
    ),
}  # fmt: skip


def _parser(command: str) -> argparse.ArgumentParser:
    text = sentence(SUBCOMMANDS[command][1])
    parser = parser_of(f"alchemist {command}", text, OPTIONS.get(command, ()))
    parser.epilog = "The Ray cluster is that of RAY_ADDRESS, or the one on this machine."
    if command != "status":
        parser.add_argument("name", help="name or id of the gang, as in `alchemist status`")
    return parser
