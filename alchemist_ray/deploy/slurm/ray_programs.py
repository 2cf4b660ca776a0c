"""Programs of a job's Ray: ``python -m alchemist_ray.deploy.slurm.ray_programs start|wait ...``."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import ray
from ray.scripts import scripts

POLL_INTERVAL_S = 0.1


def start(options: list[str]) -> int:
    """Run ``ray start`` without Ray Client's server.

    Ray starts that server on the head whenever gRPC is installed, at all interfaces, and has no
    option against it. Sessions do not use it.
    """
    commands: Any = scripts
    commands.get_ray_client_dependency_error = lambda: "not used"
    return int(commands.cli(["start", *options]) or 0)


def wait(address: str, nodes: int, limit_s: float) -> int:
    """Wait until a cluster has N nodes. Returns 0, or 1 after `limit_s` without another one.

    Each new node is printed: the supervisor takes the output for progress.
    """
    deadline = time.monotonic() + limit_s
    found, most = "no cluster", 0
    while time.monotonic() < deadline:
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            alive = sum(node["Alive"] for node in ray.nodes())
            if alive >= nodes:
                ray.shutdown()
                return 0
            found = f"{alive} of {nodes} nodes"
            if alive > most:
                most, deadline = alive, time.monotonic() + limit_s
                print(found, flush=True)
        except (ConnectionError, RuntimeError) as error:  # the head is starting
            found = f"no cluster: {error}"
        time.sleep(POLL_INTERVAL_S)
    print(f"Ray at {address} has {found}; no node joined for {limit_s:.0f} s")
    return 1


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["start", *options]:
            sys.exit(start(options))
        case ["wait", address, nodes, limit_s]:
            sys.exit(wait(address, int(nodes), float(limit_s)))
