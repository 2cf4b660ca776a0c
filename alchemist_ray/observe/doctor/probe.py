"""The part of the doctor on every node: a Ray actor, or a process of a job's step.

``python -m alchemist_ray.observe.doctor.probe`` reads one request per line, and answers in short
lines.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from alchemist_ray.observe.doctor import (
    environment,
    leftovers,
    machine,
    network,
    security,
    software,
)
from alchemist_ray.observe.doctor.finding import LIMIT_S, Check, Expected, run_checks, to_map
from mpi_workers.wire.interfaces import interfaces

PIECE_CHARS = 700  # srun forwards at most 1024 bytes of several tasks at a time


class Probe:
    """The checks of a node.

    Parameters
    ----------
    name : str, optional
        Name of the node. Default: its own.
    ray_address, ray_cpus : str, float
        The node's address and CPUs in Ray, if Ray runs there.
    """

    def __init__(self, name: str = "", ray_address: str = "", ray_cpus: float = 0.0) -> None:
        self.name = name or network.node_name()
        self._ray_address = ray_address
        self._ray_cpus = ray_cpus
        self._listener: network.Listener | None = None

    def examine(self, expected: Mapping[str, Any], peers: int) -> dict[str, Any]:
        """Run all checks of the node. Returns `findings`, `versions` and `interfaces`."""
        wanted = _expected(expected)
        checks: dict[str, Check] = {
            **machine.CHECKS,
            "cores": lambda _: machine.cores(self._ray_cpus),
            "network interface": lambda e: network.used_interface(e, self._ray_address, peers),
            "host name": network.own_name,
            **software.CHECKS,
            **environment.CHECKS,
            **security.CHECKS,
        }
        return {
            "findings": to_map(f.on(self.name) for f in run_checks(checks, wanted, LIMIT_S)),
            "versions": software.versions(),
            "interfaces": interfaces(),
        }

    def listen(self, expected: Mapping[str, Any], others: list[str]) -> list[Any]:
        """Open a listener for the other nodes. Returns its address."""
        self.stop_listening()
        towards = next((name for name in others if name != self.name), "")
        address = network.own_address(_expected(expected), self._ray_address, towards)
        self._listener = network.Listener(self.name, address)
        return list(self._listener.address)

    def dial(
        self, listeners: Mapping[str, Any], limit_s: float = network.DIAL_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Connect to the other nodes' listeners, see `network.dial`."""
        return network.dial(self.name, listeners, limit_s)

    def sweep(self, age_s: float) -> list[str]:
        """Remove shared memory of ranks just killed, see `leftovers.remove_mpich`."""
        return leftovers.remove_mpich(age_s)

    def stop_listening(self) -> None:
        """Close the listener."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _expected(told: Mapping[str, Any]) -> Expected:
    return Expected(**{**told, "interface": tuple(told["interface"])})


def main() -> None:
    """Answer requests ``[method, arguments]`` until the input ends.

    An answer is split into lines ``name|more|piece``: a step's output arrives in pieces of 1 KiB,
    mixed with those of other nodes.
    """
    probe = Probe()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = {"value": getattr(probe, method)(*arguments)}
        except Exception as error:  # goes to the caller
            answer = {"error": f"{type(error).__name__}: {error}"}
        text = json.dumps(answer)
        pieces = [text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS)]
        for number, piece in enumerate(pieces, 1):
            sys.stdout.write(f"{probe.name}|{int(number < len(pieces))}|{piece}\n")
            sys.stdout.flush()
    os._exit(0)  # without waiting for a check that hangs


if __name__ == "__main__":
    main()
