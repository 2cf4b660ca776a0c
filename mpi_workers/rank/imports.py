"""Tells of imports that take long: a large package takes a minute on a busy machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import ModuleType

SLOW_S = 5.0


class SlowImports:
    """A finder of `sys.meta_path` that finds nothing, and writes to stderr what takes long.

    A package that takes long imports many modules: it is asked for each of them.
    """

    def __init__(self) -> None:
        self._name = ""  # of the outermost module that is being imported
        self._begun = 0.0
        self._told = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if not _is_being_imported(self._name):
            self._name, self._begun, self._told = name, time.monotonic(), False
        elif not self._told and time.monotonic() - self._begun > SLOW_S:
            self._told = True
            sys.stderr.write(
                f"importing {self._name}: {SLOW_S:.0f} s so far. The first call that needs a "
                "package imports it; later calls have it\n"
            )


def _is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
