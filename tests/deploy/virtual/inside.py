"""A program on the host whose gang is in guests: a line of JSON on what came of it."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import LaunchError

START_S = 600.0


def where(comm: Any) -> list[str]:
    return comm.allgather(os.uname().nodename)


def opened() -> AlchemistSession:
    """A session with a rank in each guest.

    An emulated processor takes half a minute to import Ray: agents are not ready in the time
    that is theirs, but the next attempt finds them.
    """
    end = time.monotonic() + START_S
    while True:
        try:
            return AlchemistSession(
                2, strategy="STRICT_SPREAD", start_timeout_s=200, progress=False
            )
        except LaunchError as error:
            print(f"again: {error}", file=sys.stderr, flush=True)
            if time.monotonic() > end:
                raise


def main() -> None:
    with opened() as session:
        hosts = session.run(where)
        rng = np.random.default_rng(1)
        A, B = rng.standard_normal((200, 100)), rng.standard_normal((100, 50))
        linalg = session.load_library("linalg")
        C = linalg.matmul(session.send_matrix(A), session.send_matrix(B))
        told = {
            "hosts": hosts,
            "sum": session.run(lambda comm: comm.allreduce(comm.rank)),
            "error": float(np.abs(C.fetch() - A @ B).max()),
        }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
