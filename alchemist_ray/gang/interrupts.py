"""Defers Ctrl-C while a frame is being sent or received."""

from __future__ import annotations

# The same functions of `signal` make enumerations, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import threading
from signal import SIGINT
from types import FrameType
from typing import Any, Self


class DeferredInterrupt:
    """A context that defers SIGINT; at its end the previous handler runs.

    A KeyboardInterrupt between two bytes of a frame would leave the stream unreadable. Only the
    main thread of a process gets signals; in others this does nothing. Cost: two system calls.
    """

    def __enter__(self) -> Self:
        self._pending: tuple[int, FrameType | None] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self._handler = _signal.getsignal(SIGINT)
            if callable(self._handler):
                _signal.signal(SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = (number, frame)

    def __exit__(self, *_: object) -> None:
        if callable(self._handler):
            _signal.signal(SIGINT, self._handler)
            if self._pending is not None:
                self._handler(*self._pending)
