"""Ray's worker process in a batch job, which outlives the SIGTERM of scancel.

Ray runs this file by its path, also in a job's own Python, which need not have this package. Ray's
own handler ends the worker; children of a worker, and tasks that call subprocesses, get SIGTERM.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from types import FrameType
from typing import Any

if __name__ == "__main__":
    import ray
    from ray._private import utils

    owner = os.getpid()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def set_handler(_: Any) -> None:
        """Replace Ray's function: its main loop sets a handler that ends the worker."""
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    utils.set_sigterm_handler = set_handler
    path = os.path.join(os.path.dirname(ray.__file__), "_private", "workers", "default_worker.py")
    sys.path[0] = os.path.dirname(path)  # not this folder, whose names a program may use
    runpy.run_path(path, run_name="__main__")
