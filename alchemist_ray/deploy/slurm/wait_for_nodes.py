"""Wait until a Ray cluster has N nodes: ``python -m alchemist_ray.deploy.slurm.wait_for_nodes``."""

from __future__ import annotations

import logging
import sys
import time

import ray

POLL_INTERVAL_S = 0.1


def main(address: str, nodes: int, limit_s: float) -> int:
    """Return 0 when all nodes are alive, 1 after `limit_s` without another one.

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
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
