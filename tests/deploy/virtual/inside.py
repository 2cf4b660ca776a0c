"""A program on the host whose gang is in guests: a line of JSON on what came of it.

Its words are those of the `up` that starts one guest more, which joins the gang and leaves it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import LaunchError
from tests.deploy.virtual.lab import ALCHEMIST

START_S = 600.0
T = TypeVar("T")


def where(comm: Any) -> list[str]:
    return comm.allgather(os.uname().nodename)


def patiently(work: Callable[[], T]) -> T:
    """Repeat what starts ranks in guests.

    An emulated processor takes half a minute to import Ray: agents are not ready in the time
    that is theirs, but the next attempt finds them.
    """
    end = time.monotonic() + START_S
    while True:
        try:
            return work()
        except LaunchError as error:
            print(f"again: {error}", file=sys.stderr, flush=True)
            if time.monotonic() > end:
                raise


def opened(ranks: int) -> AlchemistSession:
    """A session with a rank in each guest."""
    return patiently(
        lambda: AlchemistSession(
            ranks, strategy="STRICT_SPREAD", start_timeout_s=200, progress=False
        )
    )


def virtual_cluster(*words: str) -> None:
    """Run ``alchemist virtual-cluster``."""
    subprocess.run([*ALCHEMIST, *words], check=True, stdout=sys.stderr)


def main(up: list[str]) -> None:
    with opened(2) as session:
        hosts = [session.run(where)]
        rng = np.random.default_rng(1)
        A, B = rng.standard_normal((200, 100)), rng.standard_normal((100, 50))
        linalg = session.load_library("linalg")
        handles = session.send_matrix(A), session.send_matrix(B)
        total = session.run(lambda comm: comm.allreduce(comm.rank))
        errors = []

        def multiply() -> None:
            errors.append(float(np.abs(linalg.matmul(*handles).fetch() - A @ B).max()))

        multiply()
        virtual_cluster(*up)
        patiently(lambda: session.resize(3))
        hosts.append(session.run(where))
        multiply()
        patiently(lambda: session.resize(2))
        hosts.append(session.run(where))
        virtual_cluster("down", "--name", "more")
        multiply()
    print(json.dumps({"hosts": hosts, "sum": total, "errors": errors}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
