"""Which modules are the user's own, and tracebacks in IPython of these alone. Logs of Ray."""

from __future__ import annotations

import os
import re
import site
import sysconfig
import traceback
from types import TracebackType

OURS = ("alchemist_ray", "mpi_workers", "ali")
NATIVE_FRAME = re.compile(r"\[0x[0-9a-f]+\]|^\*\*\* StackTrace")


def _installed() -> tuple[str, ...]:
    """Folders whose modules a rank can import as well as we can."""
    paths = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.join(path, "") for path in paths if path)


_INSTALLED = _installed()


def is_ours(name: str) -> bool:
    """Return whether a module of this name is part of this package."""
    return name.partition(".")[0] in OURS


def is_users_own(name: str, file: object) -> bool:
    """Return whether a module of this name and file is neither installed nor of this package."""
    return isinstance(file, str) and not is_ours(name) and not file.startswith(_INSTALLED)


def callers_traceback(error: BaseException, shown: BaseException) -> list[str]:
    """Return an error's traceback in IPython with the frames of the user's code only.

    `traceback.print_exc` prints all frames. `shown` is a copy of `error` without its context: that
    is kept if it is the user's.
    """
    from IPython import get_ipython  # noqa: PLC0415 - optional

    if _users_frames(getattr(error.__context__, "__traceback__", None)) is not None:
        shown.__context__ = error.__context__
    told = (type(shown), shown, _users_frames(error.__traceback__))
    if (shell := get_ipython()) is None:  # a shell that is not the process's only one
        return traceback.format_exception(*told)
    lines: list[str] = shell.InteractiveTB.structured_traceback(*told)
    return lines


def _users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without this package, and what it has called beside the user's code."""
    frames, inside = [], False
    while trace is not None:
        frame = trace.tb_frame
        name = frame.f_globals.get("__name__", "")
        inside = inside or is_ours(name)
        if not inside or is_users_own(name, frame.f_code.co_filename):
            frames.append(trace)
        trace = trace.tb_next
    kept = None
    for part in reversed(frames):
        kept = TracebackType(kept, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return kept


def without_native_frames(text: str) -> str:
    """Return a log of Ray's processes without the C++ stacks: a line above them has the cause."""
    return "\n".join(line for line in text.splitlines() if not NATIVE_FRAME.search(line)).strip()
