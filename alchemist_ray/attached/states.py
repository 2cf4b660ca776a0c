"""The states of a gang, and which may follow which."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class GangState(StrEnum):
    """The states of a gang; `GangInfo` and metrics show them.

    Attributes
    ----------
    words : str
        What messages say of a gang in this state, after its name.
    """

    words: str

    def __new__(cls, value: str, words: str) -> Self:
        state = str.__new__(cls, value)
        state._value_, state.words = value, words
        return state

    NONE = "none", "has ended"
    STARTING = "starting", "is being started"
    READY = "ready", "has workers"
    RESIZING = "resizing", "is being moved to other ranks"
    RECOVERING = "recovering", "is being started again"
    FAILED = "failed", "has failed"
    ENDING = "ending", "is being ended"

    @property
    def next(self) -> frozenset[GangState]:
        """The states that may follow."""
        return _NEXT[self]

    @property
    def has_ranks(self) -> bool:
        """Whether data can be moved to and from its ranks."""
        return self in (GangState.READY, GangState.RESIZING)


_LOST = {GangState.RECOVERING, GangState.FAILED, GangState.ENDING}
_NEXT = {
    GangState.NONE: frozenset({GangState.STARTING}),
    GangState.STARTING: frozenset(
        {GangState.READY, GangState.FAILED, GangState.ENDING, GangState.NONE}
    ),
    GangState.READY: frozenset({GangState.RESIZING, *_LOST}),
    GangState.RESIZING: frozenset({GangState.READY, *_LOST}),
    GangState.RECOVERING: frozenset({GangState.READY, GangState.FAILED, GangState.ENDING}),
    GangState.FAILED: frozenset({GangState.ENDING, GangState.NONE}),
    GangState.ENDING: frozenset({GangState.NONE}),
}
