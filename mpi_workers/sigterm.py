"""SIGTERM in a batch job: Slurm sends it to all processes of a job at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

# Set where the keeper of a batch job ends all processes of Ray and of its gangs.
KEPT_VARIABLE = "ALCHEMIST_KEPT"


def outlive_sigterm() -> bool:
    """Ignore SIGTERM where a batch job's keeper ends this process in time; whether it does.

    At scancel the program saves its state, and needs this process for that. Children of this
    process do not ignore SIGTERM.
    """
    if KEPT_VARIABLE not in os.environ:
        return False
    owner = os.getpid()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # Ray blocks it there
    return True
