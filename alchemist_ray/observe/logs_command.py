"""``alchemist logs``: the log files of a gang, of all nodes, in the order of their times."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
import ray._private.worker
from ray.exceptions import RayError

from alchemist_ray.errors import SessionError
from alchemist_ray.observe.logs import MANAGER, NodeLog
from alchemist_ray.runtime.cluster.ray_calls import ask
from alchemist_ray.runtime.cluster.ray_cluster import join_ray
from alchemist_ray.runtime.driver import find_driver

FOLLOW_INTERVAL_S = 1.0


ANSWER_S = 30.0


LINES = 100


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist logs``. Returns 0."""
    asked = _parser().parse_args(argv[1:])
    join_ray(None, start=False)
    with contextlib.suppress(KeyboardInterrupt):  # the end of --follow
        _show(asked)
    return 0


def _show(asked: argparse.Namespace) -> None:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist logs",
        description="Print what the ranks of a gang have printed, and the log of its manager. Also "
        "for gangs that have ended, as long as their Ray cluster runs.",
        epilog="The Ray cluster is that of RAY_ADDRESS, or the one on this machine.",
    )
    parser.add_argument("name", help="name or id of the gang, as in `alchemist status`")
    parser.add_argument("--rank", type=int, help="only the output of this rank")
    parser.add_argument(
        "--lines", type=int, default=LINES, help=f"the last N lines (default: {LINES}; 0: all)"
    )
    parser.add_argument("--follow", action="store_true", help="print new lines until Ctrl-C")
    return parser
