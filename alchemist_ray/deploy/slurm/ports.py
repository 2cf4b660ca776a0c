"""Ports of a job's Ray: a block derived from the job's number, so that jobs can share a node.

A block is below the kernel's range (32768 and up) and the same on every node. Ray's workers use
ports that the kernel chooses, which cannot collide.
"""

from __future__ import annotations

import contextlib
import re
import socket

FIRST, END = 10240, 32768
BLOCK = 16
BLOCKS = (END - FIRST) // BLOCK
TRIES = 8  # blocks to check before giving up
NAMES = (
    "gcs",
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
    "dashboard-port",
)
ON_HEAD = NAMES[-1:]


def block(job: str, attempt: int = 0) -> int:
    """Return the first port of a job's block, or of the block `attempt` places after it.

    Jobs whose numbers differ by less than `BLOCKS` - `TRIES` never share a block.
    """
    digits = re.findall(r"\d+", job.partition(".")[0])  # PBS: 123.server, 123[4].server
    number = sum(map(int, digits)) if digits else sum(job.encode())
    return FIRST + (number + attempt) % BLOCKS * BLOCK


def ports(first: int) -> dict[str, int]:
    """Return the ports of a block, by purpose."""
    return {name: first + i for i, name in enumerate(NAMES)}


def is_free(first: int, address: str) -> bool:
    """Return whether every port of a block is free on this node, at this address."""
    with contextlib.ExitStack() as stack:
        for port in ports(first).values():
            for host in ("", address):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections
                try:
                    sock.bind((host, port))
                except OSError:
                    return False
                sock.close()
    return True


def free_attempts(job: str, address: str) -> list[int]:
    """Return the attempts (see `block`) whose blocks are free on this node."""
    return [attempt for attempt in range(TRIES) if is_free(block(job, attempt), address)]
