"""The name of this process for other users of a gang."""

from __future__ import annotations

import getpass
import os
import platform


def this_process() -> str:
    """This process as others see it: ``user@host (pid 123)``."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container without a name for this user
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{platform.node()} (pid {os.getpid()})"
