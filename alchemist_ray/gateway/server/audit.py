"""The audit log: a line of JSON for each session, call and refusal."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FILE = "~/.config/alchemist/gateway/audit.log"
MOST = 1000  # characters of a fact: clients choose some of them, in messages of up to 16 MiB


def bounded(fact: Any) -> Any:
    """A fact as it is, or the beginning of its text if that is long."""
    text = fact if isinstance(fact, str) else repr(fact)
    return fact if len(text) <= MOST else text[:MOST]


class Audit:
    """Appends to a file of mode 600. Thread-safe; a full disk does not end the gateway.

    Parameters
    ----------
    path : path_like, optional
        Default: ``~/.config/alchemist/gateway/audit.log``.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path or FILE).expanduser()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
        self._file = open(fd, "a", buffering=1)  # noqa: SIM115 - until `close`
        self._lock = threading.Lock()
        self._failed = False

    def write(self, event: str, **facts: Any) -> None:
        """One line: the time (UTC), the event, and its facts that are not None."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        given = {key: bounded(value) for key, value in facts.items() if value is not None}
        entry = {"time": now, "event": bounded(event), **given}
        line = json.dumps(entry, default=str, skipkeys=True)
        try:
            with self._lock:
                self._file.write(line + "\n")
                self._failed = False
        except (OSError, ValueError) as error:
            if not self._failed:
                self._failed = True
                sys.stderr.write(f"alchemist gateway: {self.path} cannot be written: {error}\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()
