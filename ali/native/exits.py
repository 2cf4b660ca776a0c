"""A library that ends the process of its rank, by `exit` in C or STOP in Fortran, is named for it.

The gang is lost then, but code 0 and no word would be all that the user saw of the cause.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)


@functools.cache  # keeps the handler alive
def report_exits() -> Any:
    """Have this process say that a library has ended it, and end with a code other than 0.

    Ranks end themselves without the handlers of exit(3), so only a library's call runs them.
    """
    handler = _HANDLER(_report)
    on_exit = getattr(ctypes.CDLL(None), "on_exit", None)  # of glibc
    if on_exit is not None:
        on_exit(handler, None)
    return handler


def _report(code: int, _argument: int | None) -> None:
    sys.stderr.write(
        f"a library has ended this rank's process with code {code}: it called exit(), or STOP in "
        "Fortran. It must return an error instead (alchemist_fail, alchemist_failed)\n"
    )
    sys.stderr.flush()
    os._exit(code or 1)
