"""An error in the form in which it crosses a process boundary: kind, message and facts.

The rank side raises `Failure`. A frame carries its map. `alchemist_ray.errors` turns the kind
into the error class of the same name, which the user sees. The loss of a rank becomes an error in
`alchemist_ray.runtime.commands.nodes`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

MESSAGE_LIMIT = 32 << 10  # characters that travel: errors of many ranks must fit into one frame


class Failure(Exception):
    """An error to report to the user.

    Parameters
    ----------
    kind : str
        Name of an error class of `alchemist_ray.errors`.
    message : str
        Names the thing at fault, the problem and the remedy.
    **facts
        Further details (msgpack types only), e.g. ``rank``, ``traceback``.

    Attributes
    ----------
    interrupted : bool
        Whether ranks were ended in the middle of the call; not sent.
    """

    interrupted = False

    def __init__(self, kind: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.facts = facts

    def to_map(self) -> dict[str, Any]:
        message, left_out = self.message[:MESSAGE_LIMIT], len(self.message) - MESSAGE_LIMIT
        if left_out > 0:
            message += f" ... ({left_out} more characters)"
        return {"kind": self.kind, "message": message, "facts": self.facts}

    @classmethod
    def from_map(cls, fields: dict[str, Any]) -> Failure:
        failure = cls(
            str(fields.get("kind", "AlchemistError")),
            str(fields.get("message", "the other side gave no reason")),
        )
        facts = fields.get("facts")
        if isinstance(facts, dict):
            failure.facts.update(facts)
        return failure

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure.from_map, (self.to_map(),)


class Interrupted(Exception):
    """Raised inside a routine on one rank: the call failed on another rank or was cancelled.

    Attributes
    ----------
    place : str
        Where the routine was, in words. Empty: its innermost frame tells.
    raised_s : float
        When, by the monotonic clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        self.raised_s = time.monotonic()


def text_of(error: BaseException) -> str:
    """The text of an error; its own code may raise, or return no text."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # as `traceback` says


def describe_status(status: int) -> str:
    """How a process ended, in words. `status` is that of waitpid."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "an unknown signal"
        return f"was killed by signal {number} ({name})"
    return f"exited with code {os.WEXITSTATUS(status)}"
