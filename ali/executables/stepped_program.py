"""An MPI program whose processes are the ranks, and which a simulator asks step by step.

A simulator in Python starts the program, which is not modified, and translates::

    from ali.executables.stepped_program import SteppedProgram

    @routine()
    def reset(ctx: Context) -> None:
        ctx.state["program"] = SteppedProgram(ctx, ["./solver", "-i", "in.dat"])

    @routine()
    def step(ctx: Context, action: list[float]) -> None:
        line = ctx.state["program"].ask("step " + " ".join(map(repr, action)))
        ctx.state["field"] = [float(word) for word in line.split()]  # of rank 0

The library ``program`` (`ali.executables.simulator`) does so for programs that speak its protocol.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mpi4py import MPI

from ali.executables.process import ready
from ali.executables.program import Program, Streams
from mpi_workers.failures import Failure, Interrupted

if TYPE_CHECKING:
    from ali.interface import Context

ANSWERED = 32001  # tag of rank 0's messages: it has the answer
LOOK_S = 0.0002  # between looks for this message; doubles up to the limit
LOOK_LIMIT_S = 0.02
END_TIMEOUT_S = 5.0  # for the program to end after its input was closed
SHOWN = 4000  # last characters of its standard error in a failure
PIPE = 1 << 20  # 1 MiB: Linux gives 64 KiB, and the program waits for each of them to be read


class SteppedProgram:
    """A running program with one process per rank, and pipes to that of rank 0.

    All its methods are collective. While rank 0 waits for an answer, the other ranks watch their
    processes. After an error the program has been ended.

    Parameters
    ----------
    ctx : Context
    argv : sequence of str
        The executable and its arguments, as for `AlchemistSession.run_program`.
    folder : path, optional
        Its working directory.
    environment : mapping, optional
        Variables to add.

    Raises
    ------
    Failure
        BadArgumentError, if it cannot be started.
    """

    def __init__(
        self,
        ctx: Context,
        argv: Sequence[str],
        folder: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._rank, self._size, self._comm = ctx.rank, ctx.size, ctx.comm
        self._name = os.path.basename(argv[0])
        self._buffer = bytearray()
        self._output = self._input = -1
        self._over = False
        self._closing = contextlib.ExitStack()
        self._errors = self._closing.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        task = {
            "name": self._name,
            "argv": list(argv),
            "env": dict(environment or {}),
            "cwd": None if folder is None else os.fspath(folder),
            "cwd_needed": True,
            "check": True,
            "result": self._comm.bcast(uuid.uuid4().hex),
        }
        try:
            with contextlib.ExitStack() as theirs:
                streams = self._pipes(theirs)
                self._program = Program(ctx.gang, task, {}, self._closing, streams)
        except BaseException:
            self.end()
            raise
        if self._rank == 0:
            self._program.serve[self._output] = self._receive

    def _pipes(self, theirs: contextlib.ExitStack) -> Streams:
        if self._rank != 0:
            return Streams(stderr=self._errors.fileno())
        (stdin, self._input), (self._output, stdout) = os.pipe(), os.pipe()
        with contextlib.suppress(OSError):  # this user has as many large pipes as allowed
            fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, PIPE)
        os.set_blocking(self._input, False)
        for fd in (stdin, stdout):
            theirs.callback(os.close, fd)
        self._closing.callback(os.close, self._output)
        return Streams(stdin, stdout, self._errors.fileno())

    @property
    def running(self) -> bool:
        """Whether the process of this rank may be asked."""
        return not self._over and not self._program.ended

    def ask(self, line: str) -> str:
        """Send a line; on rank 0, the next line of the program's output, else "".

        Raises
        ------
        Failure
            RoutineError with the end of its standard error, if the program has ended.
        Interrupted
            If the call has failed on another rank or was cancelled.
        """
        self._exchange(line, lambda: b"\n" in self._buffer)
        found, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        return found.decode(errors="replace")

    def ask_bytes(self, line: str, count: int) -> bytes:
        """The same for an answer of `count` bytes."""
        self._exchange(line, lambda: len(self._buffer) >= count)
        found = bytes(memoryview(self._buffer)[:count])
        del self._buffer[:count]
        return found

    def wait(self) -> None:
        """Close its input, and wait until it ends, for programs that are run once for each step.

        Raises
        ------
        Failure, Interrupted
            As `ask`.
        """
        self._close_input()
        with self._in_use():
            while self._program.turn() is None:
                pass
        self.end()

    def _exchange(self, line: str, complete: Callable[[], bool]) -> None:
        with self._in_use():
            if self._rank != 0:
                self._watch()
                return
            self._send(line.encode() + b"\n")
            ended = False
            while not complete():
                if ended and not self._has_output():
                    raise Failure("RoutineError", f"program {self._name} has ended with code 0")
                ended = self._program.turn() is not None or self._program.ended
            while self._program.agreeing:  # the others may wait for this rank: MPI_Finalize, end
                self._program.turn()
            for rank in range(1, self._size):
                self._comm.Send([b"", MPI.BYTE], rank, ANSWERED)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """End the program after an error; the end of its output is in the message of a failure."""
        if self._over:
            raise Failure("RoutineError", f"program {self._name} has been ended: start another")
        try:
            yield
        except Failure as error:
            message = f"{error.message}{self._said()}"
            self.end()
            raise Failure(error.kind, message, **error.facts) from None
        except BaseException:
            self.end()
            raise

    def _watch(self) -> None:
        """Serve this rank's process until rank 0 has its answer.

        A rank may be late: rank 0 does not wait for it.
        """
        interval_s = LOOK_S
        while not self._comm.Iprobe(0, ANSWERED):
            self._program.turn(interval_s)
            interval_s = min(2 * interval_s, LOOK_LIMIT_S)
        self._comm.Recv([bytearray(), MPI.BYTE], 0, ANSWERED)

    def _has_output(self) -> bool:
        """Whether the program has written what has not been read."""
        return self._output in self._program.serve and bool(ready([self._output], 0.0))

    def _send(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._input, rest) :]
            except BlockingIOError:  # it does not read now: it may be writing, or have ended
                if self._program.turn(LOOK_S) is not None or self._program.ended:
                    return
            except OSError:  # it has closed its input: its end is noticed next
                return

    def _receive(self) -> bool:
        data = os.read(self._output, PIPE)
        self._buffer += data
        return bool(data)

    def _said(self) -> str:
        """The end of its standard error, for a message."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - SHOWN))
        said = self._errors.read().decode(errors="replace").strip()
        return f": {said}" if said else ""

    def close(self) -> None:
        """Close its input, and kill it if it does not end by itself."""
        self._close_input()
        deadline = time.monotonic() + END_TIMEOUT_S
        try:
            while self.running and time.monotonic() < deadline:
                self._program.turn(LOOK_LIMIT_S)
        except (Failure, Interrupted):
            return  # it is over
        finally:
            self.end()

    def end(self) -> None:
        """Kill this rank's process and what it has started. May be called twice; not collective."""
        self._over = True
        self._close_input()
        self._closing.close()

    def _close_input(self) -> None:
        if self._input >= 0:
            os.close(self._input)
            self._input = -1
