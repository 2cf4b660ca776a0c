"""See that a Ray cluster has so many nodes: `python -m alchemist_ray.deploy.slurm.ready`."""

from __future__ import annotations

import logging
import sys
import time

import ray

POLL_INTERVAL_S = 0.1


def main(address: str, nodes: int, limit_s: float) -> int:
    """0 as soon as they are there, 1 if they are not in time."""
    deadline = time.monotonic() + limit_s
    found = "no cluster"
    while time.monotonic() < deadline:
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            alive = sum(node["Alive"] for node in ray.nodes())
            if alive >= nodes:
                ray.shutdown()
                return 0
            found = f"{alive} of {nodes} nodes"
        except (ConnectionError, RuntimeError) as error:  # its head is not up yet, or again
            found = f"no cluster: {error}"
        time.sleep(POLL_INTERVAL_S)
    print(f"Ray at {address} has {found} after {limit_s:.0f} s")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
