"""Signals that end a job: recorded on arrival, checked where it is safe; ends of processes."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALLED_END_S = 5.0  # for a process to end after a signal


class Terminated(BaseException):
    """The batch system or the user has asked the job to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def interrupt_on_termination() -> None:
    """Have SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


class Signals:
    """Records SIGTERM and SIGHUP, and Ctrl-C unless a program has the terminal."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.arrived = 0.0  # when, by the monotonic clock
        self.time_left = ""  # of the job when the signal came, if known
        self.program_has_terminal = False
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or not self.program_has_terminal:
            self.received = signal.Signals(number)
            self.arrived = self.arrived or time.monotonic()

    def check(self) -> None:
        """Raise `Terminated` if a signal has arrived."""
        if self.received is not None:
            raise Terminated(self.received)


def end(process: subprocess.Popen[Any], wait_s: float) -> None:
    """Wait for a process, then SIGTERM and SIGKILL it: a killed srun would leave its tasks."""
    for stop in (process.terminate, process.kill):
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return
        stop()
        wait_s = SIGNALLED_END_S
    with suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)


def exit_code(process: subprocess.Popen[Any]) -> int:
    """Return the exit code of a process that has ended, as a shell reports it."""
    code = int(process.returncode)
    return 128 - code if code < 0 else code
