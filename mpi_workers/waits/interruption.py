"""How a call is ended from outside: the interrupt word, which waits in MPI read, and a signal.

A rank that raises before a collective would hang the other ranks in it. So

1. the node's proxy writes the call's number into the interrupt word;
2. the layer under MPI (`mpi_layer`), which reads the word while a call of MPI waits, returns an
   error: an `MPI.Exception` in Python;
3. `EndedWaits` makes `Interrupted` of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable, Container, Iterator
from enum import IntFlag
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from mpi_workers.deadlines import CLEAN_UP_S
from mpi_workers.failures import Interrupted
from mpi_workers.waits import mpi_layer
from mpi_workers.waits.mpi_calls import SLOT

# Modules in which the signal raises nothing: functions that native code calls, through which no
# exception passes, and programs of ranks, which must not be left half started or half ended.
OURS = ("mpi_workers.", "ali.native.host", "ali.executables.process", "ali.executables.program")
LEAVING_S = 0.25  # from a wait that was left to the exception
SLOTS = 1023  # ranks of a node that show it


class InterruptWord:
    """The number of the last call that must end, in a file that all ranks of a node map.

    The node's proxy raises the number. A rank leaves its wait when its call's number is at most the
    word.
    Behind it each rank shows the proxy in which MPI call it waits.

    Raises
    ------
    OSError
        If the path is a symbolic link, or another user's file.
    """

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            about = os.fstat(fd)
            if about.st_uid != os.getuid() or not stat.S_ISREG(about.st_mode):
                raise PermissionError(
                    f"{path} is not a file of this user: remove it, or set TMPDIR to a folder of "
                    "your own"
                )
            nbytes = (1 + SLOTS) * SLOT
            os.ftruncate(fd, nbytes)
            self._map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self.path = Path(path)
        self._words = memoryview(self._map).cast("Q")

    @property
    def address(self) -> int:
        """In memory, for the layer under MPI."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def raise_to(self, call: int) -> None:
        """End every call up to number `call` on this node."""
        self._words[0] = max(self._words[0], call)

    def ends(self, call: int) -> bool:
        return bool(self._words[0] >= call)

    def waits_in(self, index: int) -> str:
        """The MPI call in which a rank waits, by its place on this node: ``Recv``; or empty."""
        begin = (1 + index) * SLOT
        name, *_ = self._map[begin : begin + SLOT].partition(b"\0")
        return name.decode(errors="replace")

    def program_s(self, index: int) -> float:
        """The seconds that the program of a rank has been in MPI."""
        seconds: float = struct.unpack_from("d", self._map, (2 + index) * SLOT - 8)[0]
        return max(0.0, seconds + time.monotonic() if self.waits_in(index) else seconds)

    def clear(self) -> None:
        """All processes that read it have ended."""
        self._map[:] = bytes(len(self._map))

    def forget(self, index: int) -> None:
        """The process that used this slot has ended."""
        begin = (1 + index) * SLOT
        self._map[begin : begin + SLOT] = bytes(SLOT)


def end_on_signal(cancelled: Callable[[], bool], entry_points: Container[CodeType]) -> None:
    """Have SIGINT raise `Interrupted` in the code that a cancelled call runs.

    For loops and sleeps that do not read the word. It is raised only in code that the functions
    `entry_points` have called, and not within `OURS`. The signal is repeated, so code that cleans
    up after `Interrupted`, or after the error of a wait in MPI, is left alone for `CLEAN_UP_S`.
    """

    def on_signal(_number: int, frame: FrameType | None) -> None:
        if cancelled() and not _cleans_up() and _foreign(frame, entry_points):
            leave()
            raise Interrupted

    signal.signal(signal.SIGINT, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's workers block it


def _cleans_up() -> bool:
    """Whether a recent `Interrupted` is being handled, or what was raised meanwhile."""
    error = sys.exception()
    since_s = time.monotonic() - mpi_layer.state().left_s
    # At first the code that has left a wait may still return its error to Python.
    if left_in() and since_s < (LEAVING_S if error is None else CLEAN_UP_S):
        return True
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None and time.monotonic() < error.raised_s + CLEAN_UP_S


def _foreign(frame: FrameType | None, entry_points: Container[CodeType]) -> bool:
    """Whether a routine's or a user's own code runs in this frame, below an entry point."""
    while frame is not None:
        if frame.f_code in entry_points:
            return True
        if str(frame.f_globals.get("__name__", "")).startswith(OURS):
            return False
        frame = frame.f_back
    return False


def place(error: BaseException) -> str:
    """Where a call was interrupted: ``recv at hang (lib.py:12)``; empty if not known.

    The innermost code outside of this package, and the wait that it has called, or its import.
    """
    if isinstance(error, Interrupted) and error.place:
        return error.place
    found, wait, trace = "", "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if found and code.co_name == "<module>" and module != "__main__":
            return f"import of {module} at {found}"
        if module.startswith("mpi4py"):
            wait = wait or code.co_name.rpartition(".")[2] + " at "
        elif not module.startswith(OURS):
            file = os.path.basename(code.co_filename)
            found, wait = f"{code.co_qualname} ({file}:{trace.tb_lineno})", ""
        trace = trace.tb_next
    return wait + found if found else ""


_word: InterruptWord | None = None  # of this process: one rank, one gang, one call at a time
_index = 0  # of this rank on its node
_left: list[BaseException] = []  # their frames have memory that MPI may still write into


def watch(word: InterruptWord, *, crowded: bool, one_node: bool = True, index: int = 0) -> None:
    """Let this process's waits read `word`, and show in which call they are.

    Parameters
    ----------
    word : InterruptWord
    crowded : bool
        Whether the node has more ranks than cores.
    one_node : bool
        Whether it has all ranks of the gang.
    index : int
        Of this rank on its node.
    """
    global _word, _index
    _word, _index = word, index
    state = mpi_layer.state()
    state.word, state.crowded, state.one_node = word.address, crowded, one_node
    state.waits_in = word.address + (1 + index) * SLOT if index < SLOTS else None
    state.call = state.call or 1  # of commands, which have numbers from 1


def start_layer(comm: Any, *, wanted: bool) -> bool:
    """Let MPI's own waits read the word, if all ranks have the layer; whether they do.

    Collective.
    """
    layer, state = mpi_layer.loaded(), mpi_layer.state()
    started = layer is not None and wanted and layer.alchemist_waits_start() == 0
    state.active = all(comm.allgather(started))
    return bool(state.active)


def begin(call: int) -> None:
    """Assign the waits from now on to this call."""
    state = mpi_layer.state()
    state.call, state.left_in, state.refused, state.sequence = call, None, 0, 0


def drop_messages() -> None:
    """Receive and drop what earlier calls have sent: no rank may have sent anything since."""
    layer = mpi_layer.loaded()
    if layer is not None and mpi_layer.state().ended:  # it was started
        layer.alchemist_waits_drop()


def used() -> bool:
    """Whether the current call has used MPI; True where that is not known."""
    return mpi_layer.loaded() is None or bool(mpi_layer.state().used)


def end(*, succeeded: bool) -> None:
    """The call has ended, and nothing that it has left under way in MPI goes on."""
    state, layer = mpi_layer.state(), mpi_layer.loaded()
    if not state.used or layer is None:
        return
    state.used = 0
    if succeeded and state.active:
        layer.alchemist_waits_end()


def has_used_communicators(*, but: Of) -> bool:
    """Whether the current call has used communicators that still exist and are none of `but`.

    But those of the product: messages to ranks that have left the call may be on them.
    """
    layer = mpi_layer.loaded()
    return layer is not None and bool(layer.alchemist_waits_used(int(but)))


def sequence() -> int:
    """The collectives of the current call on communicators that outlive it, hashed, in 32 bits.

    If a call has failed and ranks differ, these processes must not run another one, though nothing
    is under way: a rank may have completed a collective that another one has left out.
    """
    return int(mpi_layer.state().sequence)


def buffer_is_attached() -> bool:
    """Whether a call has attached a buffer for ``Bsend``, and not detached it."""
    return bool(mpi_layer.state().attached)


def leftovers() -> str:
    """The operations and messages that calls have left since the last question; or empty."""
    state = mpi_layer.state()
    found = []
    if count := state.messages:
        last = f"the last one from rank {state.source} with tag {state.tag}"
        found.append(f"{count} message{'s' * (count > 1)} that no rank had received, {last}")
    if count := state.requests:
        found.append(f"{count} operation{'s' * (count > 1)} under way")
    state.messages = state.requests = 0
    return " and ".join(found)


def unsafe() -> str:
    """Why this process must not run another call; empty if it may."""
    why: bytes | None = mpi_layer.state().unsafe
    return (why or b"").decode()


def mark_unsafe(why: str) -> None:
    """This process must not run another call."""
    state = mpi_layer.state()
    state.unsafe = state.unsafe or why.encode()


def interrupt(call: int) -> None:
    """End every call up to this number on this node, as a failure on another rank would."""
    if _word is not None:
        _word.raise_to(call)


def interrupted() -> bool:
    """Whether the current call has failed on another rank or was cancelled."""
    return bool(_word is not None and _word.ends(mpi_layer.state().call))


def program_variables() -> dict[str, str]:
    """For an MPI program that this rank starts: it shows in which call it waits, as the rank does.

    Its calls are MPI's own: the end of the call ends the program.
    """
    if _word is None or _index >= SLOTS or mpi_layer.loaded() is None:
        return {}
    return {
        "LD_PRELOAD": str(mpi_layer.LIBRARY),
        "ALCHEMIST_WAITS_IN": f"{(1 + _index) * SLOT} of {_word.path}",
    }


def program_waits_in() -> str:
    """The MPI call in which that program is, or in which it has ended: ``MPI_Recv``; or empty."""
    name = "" if _word is None or _index >= SLOTS else _word.waits_in(_index)
    return f"MPI_{name}" if name else ""


def forget_program() -> None:
    """That program has ended; its time in MPI is this rank's."""
    if _word is not None and _index < SLOTS:
        note_wait(_word.program_s(_index))
        _word.forget(_index)


def left_in() -> str:
    """The MPI call that the current call has left because it is over: ``Allreduce``; or empty."""
    name: bytes | None = mpi_layer.state().left_in
    return (name or b"").decode()


def keeps_memory(request: int) -> None:
    """The memory of this operation, a handle, is kept for ever if it is left."""
    layer = mpi_layer.loaded()
    if layer is not None:
        layer.alchemist_waits_kept(request)


def leave() -> None:
    """Call it before what is under way in MPI loses its memory: receives are cancelled."""
    if mpi_layer.state().active:
        layer = mpi_layer.loaded()
        assert layer is not None
        layer.alchemist_waits_leave()


class Of(IntFlag):
    """The kind of a communicator of the gang."""

    GANG = 1  # replaced after a call that leaves a wait on it, which so does no harm
    PRODUCT = 2  # of messages that may be under way between calls, and are no user's
    ALL_CALLS = 4  # it must not be freed


def own(comm: int, about: Of) -> None:
    """Tell the layer about a communicator, a handle."""
    if mpi_layer.state().ended:  # it was started
        layer = mpi_layer.loaded()
        assert layer is not None
        layer.alchemist_waits_own(comm, int(about))


class EndedWaits:
    """A block with a call's code: errors after a wait that it has left become `Interrupted`.

    A class, because a generator would add frames of `contextlib`, which are not the call's.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        leave()
        if unsafe():
            _left.append(error)
        if isinstance(error, Interrupted) or not left_in():
            return
        interrupted = Interrupted()
        interrupted.place = place(error)
        raise interrupted from error


@contextlib.contextmanager
def uninterruptible() -> Iterator[None]:
    """Waits in MPI inside of the block read no word. On all ranks of the communicator, or none."""
    state = mpi_layer.state()
    active, state.active = state.active, 0
    try:
        yield
    finally:
        state.active = active


def waited_s() -> float:
    """Seconds that this process has spent in waits in MPI."""
    return float(mpi_layer.state().waited_s)


def note_wait(seconds: float) -> None:
    """Count a wait of native code that tests requests itself, or of a program."""
    mpi_layer.state().waited_s += seconds
