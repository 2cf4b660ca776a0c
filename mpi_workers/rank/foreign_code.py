"""Calls code of users and libraries: its changes to this process, and its children, end with it.

Restored are the standard streams, the handlers of signals, the signal mask and timers, umask and
working directory, warnings filters, the recursion limit, Python's hooks and built-in names; NumPy's
and decimal's settings and other context variables, because the code runs in a copy of the context.
"""

from __future__ import annotations

# The functions of `signal` make enums of numbers, which took 17 of the 24 us of a `restore`.
import _signal  # type: ignore[import-not-found]
import builtins
import contextlib
import fcntl
import gc
import operator
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextvars import copy_context
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from mpi_workers.failures import text_of

T = TypeVar("T")
FIRST_SPARE = 64  # descriptors of copies of the standard streams: above those that programs use
STREAMS = ("stdin", "stdout", "stderr")  # by descriptor
# Those whose handlers a call may leave behind. SIGINT ends cancelled calls; an ignored SIGCHLD
# would lose the exit codes of later children.
HOOKS = [
    *((sys, f"{kind}hook") for kind in ("except", "unraisable", "display", "breakpoint")),
    (threading, "excepthook"),
]
SIGNALS = (
    signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGALRM, signal.SIGTERM, signal.SIGHUP,
)  # fmt: skip


def called(function: Callable[..., T], *args: Any) -> T:
    """Call a function; a child that it has forked ends here, as the program of a child would.

    A child that returned would go on as this rank: answer commands, enter MPI, free matrices.
    """
    rank = os.getpid()
    try:
        value = function(*args)
    except BaseException as error:
        if os.getpid() != rank:
            _end_child(error)
        raise
    if os.getpid() != rank:
        _end_child(None)
    return value


def isolated(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a copy of the context, where a signal may interrupt it."""
    return copy_context().run(function, *args)


def _end_child(error: BaseException | None) -> NoReturn:
    """End this process with the output and the exit code of a Python program."""
    code: Any = 1
    if error is None:
        code = 0
    elif not isinstance(error, SystemExit):
        with contextlib.suppress(Exception):
            sys.stderr.write(traceback_of(error))
    elif error.code is None or isinstance(error.code, int):
        code = error.code or 0
    else:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{error.code}\n")
    flush_python()
    os._exit(code & 0xFF)


# Frames of these modules, above the user's own code, are left out of tracebacks.
HIDDEN_MODULES = (
    "mpi_workers.rank.process",
    "mpi_workers.rank.commands",
    __name__,
    "ali.interface",
    "ali.run",
)


def users_part(error: BaseException) -> TracebackType | None:
    """The traceback of an error from the first frame of the user's or library's code."""
    where = error.__traceback__
    while where and where.tb_next and where.tb_frame.f_globals.get("__name__") in HIDDEN_MODULES:
        where = where.tb_next
    return where


def traceback_of(error: BaseException) -> str:
    """The traceback of an error from the user's or library's code on."""
    where = users_part(error)
    try:
        return "".join(traceback.format_exception(type(error), error, where))
    except Exception:  # of its `__getattr__`
        lines = ["Traceback (most recent call last):\n", *traceback.format_tb(where)]
        return "".join([*lines, f"{type(error).__name__}: {text_of(error)}\n"])


def open_stream(number: int, like: Any) -> Any:
    """A standard stream of Python on its descriptor, by lines, in the encoding of `like`.

    A stream that was opened on another file would go on to be seekable, or not, as that is.
    """
    name = STREAMS[number]
    encoding, errors = like if isinstance(like, tuple) else (like.encoding, like.errors)
    stream = open(  # noqa: SIM115
        number, "r" if number == 0 else "w", buffering=1, encoding=encoding, errors=errors,
        closefd=False,
    )  # fmt: skip
    stream.buffer.raw.name = f"<{name}>"  # type: ignore[attr-defined]  # as Python names it
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
    return stream


def flush_python() -> None:
    """Write out what Python has buffered; a stream may be closed, replaced or None."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class ProcessSettings:
    """The settings of this process at the time of creation, which calls are to find.

    Create it in the main thread, when the rank's own handlers of signals are installed.
    """

    def __init__(self) -> None:
        self._streams = [getattr(sys, name) for name in STREAMS]
        self._texts = [_state(stream) for stream in self._streams]
        self._descriptors = [fcntl.fcntl(i, fcntl.F_DUPFD_CLOEXEC, FIRST_SPARE) for i in range(3)]
        self._handlers = [(int(number), _signal.getsignal(number)) for number in SIGNALS]
        self._mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._folder = os.open(".", os.O_PATH | os.O_CLOEXEC)
        self.keep()

    def keep(self) -> None:
        """Keep the interpreter's settings as they are: a library that was loaded may set them."""
        self._recursion = sys.getrecursionlimit()
        self._hooks = [(owner, name, getattr(owner, name)) for owner, name in HOOKS]
        self._tracers = sys.gettrace(), sys.getprofile(), gc.isenabled()
        self._builtins = dict(vars(builtins))
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        self._filters, self._show = list(warnings.filters), warnings.showwarning

    def restore(self) -> None:
        """Restore what a call has changed. Cheap if it has changed nothing."""
        self.restore_process()
        if sys.getrecursionlimit() != self._recursion:
            sys.setrecursionlimit(self._recursion)
        for owner, name, value in self._hooks:
            if getattr(owner, name, None) is not value:
                setattr(owner, name, value)
        if (sys.gettrace(), sys.getprofile(), gc.isenabled()) != self._tracers:
            trace, profile, collects = self._tracers
            sys.settrace(trace)
            sys.setprofile(profile)
            (gc.enable if collects else gc.disable)()
        # Names that were added stay: a module that was imported may need its own.
        now = map(vars(builtins).get, self._builtins)
        if not all(map(operator.is_, now, self._builtins.values())):
            vars(builtins).update(self._builtins)
        # Restoring makes all warnings appear again, so not after each call.
        if warnings.filters != self._filters or warnings.showwarning is not self._show:
            self._warnings.__exit__(None, None, None)
            self.keep()

    def restore_process(self) -> None:
        """Restore what concerns the whole process, not the interpreter alone."""
        for number, own in enumerate(self._descriptors):
            os.dup2(own, number)
        for number, name in enumerate(STREAMS):
            own = self._streams[number]
            if getattr(sys, name) is not own or _state(own) != self._texts[number]:
                self._restore_stream(number, name)
        _signal.setitimer(_signal.ITIMER_REAL, 0)
        for number, handler in self._handlers:
            if number == _signal.SIGINT or _signal.getsignal(number) is not handler:
                _signal.signal(number, handler)  # of SIGINT also what C code has set
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self._mask)
        os.umask(self._umask)
        with contextlib.suppress(OSError):  # removed, or no longer allowed
            os.fchdir(self._folder)

    def _restore_stream(self, number: int, name: str) -> None:
        flush_python()  # the call's own stream
        setattr(sys, name, self._streams[number])  # a wrapper of its buffer that goes closes it
        if _state(self._streams[number]) != self._texts[number]:  # closed, or set otherwise
            self._streams[number] = open_stream(number, self._texts[number][:2])


def _state(stream: Any) -> tuple[Any, ...]:
    """The state of a standard stream that a call may change; empty: it is closed."""
    try:
        state = stream.encoding, stream.errors, stream.line_buffering, stream.write_through
        return () if stream.closed else state
    except ValueError:  # its buffer has been detached
        return ()
