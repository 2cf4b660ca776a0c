"""What runs on every node: a Ray actor, or a process of a job's step that obeys lines.

python -m alchemist_ray.observe.doctor.probe     reads a request a line, answers in short lines
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from alchemist_ray.observe.doctor import leftovers, machine, network, software
from alchemist_ray.observe.doctor.finding import LIMIT_S, Check, Expected, run_checks, to_map
from alchemist_ray.runtime.network import interfaces

PIECE = 700  # characters; srun passes on no more than 1024 bytes of several tasks in one piece


class Probe:
    """A node's end of the examination.

    Parameters
    ----------
    name : str, optional
        What it is called; default: as it calls itself.
    ray_address, ray_cpus : str, float
        Its address and CPUs as Ray has them, if Ray runs there.
    """

    def __init__(self, name: str = "", ray_address: str = "", ray_cpus: float = 0.0) -> None:
        self.name = name or network.node_name()
        self._ray_address = ray_address
        self._ray_cpus = ray_cpus
        self._door: network.Door | None = None

    def look(self, expected: Mapping[str, Any], peers: int) -> dict[str, Any]:
        """All checks of a node by itself: `findings`; `versions` and `interfaces` to compare."""
        wanted = _expected(expected)
        checks: dict[str, Check] = {
            **machine.CHECKS,
            "cores": lambda _: machine.cores(self._ray_cpus),
            "network interface": lambda e: network.used_interface(e, self._ray_address, peers),
            "host name": network.own_name,
            **software.CHECKS,
        }
        return {
            "findings": to_map(f.on(self.name) for f in run_checks(checks, wanted, LIMIT_S)),
            "versions": software.versions(),
            "interfaces": interfaces(),
        }

    def open(self, expected: Mapping[str, Any], others: list[str]) -> list[Any]:
        """Open a door for the others; where."""
        self.shut()
        towards = next((name for name in others if name != self.name), "")
        address = network.own_address(_expected(expected), self._ray_address, towards)
        self._door = network.Door(self.name, address)
        return list(self._door.address)

    def dial(
        self, rank_endpoints: Mapping[str, Any], limit_s: float = network.DIAL_S
    ) -> list[dict[str, Any]]:
        """Go to the others' doors, see `network.dial`."""
        return network.dial(self.name, rank_endpoints, limit_s)

    def sweep(self, age_s: float) -> list[str]:
        """Remove shared memory of ranks that were just killed, see `leftovers.remove_mpich`."""
        return leftovers.remove_mpich(age_s)

    def shut(self) -> None:
        """Close the door."""
        if self._door is not None:
            self._door.close()
            self._door = None


def _expected(told: Mapping[str, Any]) -> Expected:
    return Expected(**{**told, "interface": tuple(told["interface"])})


def main() -> None:
    """Answer requests ``[method, arguments]`` until the input ends.

    An answer is cut into lines ``name|more|piece``: a step's output comes in pieces of 1 KiB,
    and those of several nodes may come in between.
    """
    probe = Probe()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = {"value": getattr(probe, method)(*arguments)}
        except Exception as error:  # to be told, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"}
        text = json.dumps(answer)
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
        for number, piece in enumerate(pieces, 1):
            sys.stdout.write(f"{probe.name}|{int(number < len(pieces))}|{piece}\n")
            sys.stdout.flush()
    os._exit(0)  # not waiting for a check that hangs


if __name__ == "__main__":
    main()
