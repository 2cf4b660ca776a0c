"""What a rank that crashes leaves behind: its frames, in a file that its proxy reads."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
from pathlib import Path

LIBRARY = Path(__file__).with_name("crash_frames.so")  # `crash_frames.c`, where it was built


def write_frames_to(path: str) -> None:
    """Have a crash write the frames of its thread to a file: of C where we can, then of Python."""
    file = open(path, "wb", buffering=0)  # noqa: SIM115  # faulthandler keeps it
    faulthandler.enable(file, all_threads=False)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(LIBRARY)).alchemist_show_crashes(file.fileno())
