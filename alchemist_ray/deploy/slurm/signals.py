"""Signals that end a job, taken note of here and looked at where it is safe to end."""

from __future__ import annotations

import signal
from types import FrameType


class Terminated(BaseException):
    """The batch system (or the user) wants the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Takes SIGTERM and SIGHUP, and Ctrl-C while no program has it; seen by `check`."""

    def __init__(self) -> None:
        self._came: int | None = None
        self.program_has_terminal = False
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or not self.program_has_terminal:
            self._came = number

    def check(self) -> None:
        """Raises `Terminated` if one has come."""
        if self._came is not None:
            raise Terminated(self._came)
