"""``make soak``: random sessions, calls, transfers and faults; a table of what has grown."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import uuid

import ray

from tests.soak import actions, measure
from tests.support import traces


def main() -> int:
    """Run the soak; 1 if something has grown beyond its limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="duration (default: 600)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random choices (default: 0)"
    )
    parser.add_argument(
        "--sessions", type=int, metavar="N",
        help="open and close N sessions instead, and print the growth per session",
    )  # fmt: skip
    options = parser.parse_args()
    tempfile.tempdir = tempfile.mkdtemp(prefix="at-", dir="/tmp")
    os.environ.update({traces.RUN: uuid.uuid4().hex, "TMPDIR": tempfile.tempdir})
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        ray.init(
            num_cpus=8, include_dashboard=False, log_to_driver=False,
            _temp_dir=f"{tempfile.gettempdir()}/ray",
        )  # fmt: skip
        if options.sessions:
            report = actions.sessions(options.sessions)
        else:
            report = actions.soak(options.seconds, options.seed)
        ray.shutdown()
    finally:
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    if options.sessions:
        print(measure.growth(report, options.sessions))
    else:
        print(measure.table(report))
    return 1 if measure.excess(report) else 0


raise SystemExit(main())
