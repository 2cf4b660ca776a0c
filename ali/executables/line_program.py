"""A program that a rank starts and talks to by lines of text, for simulators that are programs.

A simulator in Python starts the program, which is not modified, on rank 0, and translates::

    from ali.executables.line_program import LineProgram

    @routine()
    def setup(ctx: Context, ranks: int = 2) -> None:
        if ctx.rank == 0:
            ctx.state["program"] = LineProgram(["mpiexec", "-n", str(ranks), "./solver"])

    @routine()
    def step(ctx: Context, action: list[float]) -> None:
        if ctx.rank == 0:
            line = ctx.state["program"].ask(ctx, "step " + " ".join(map(repr, action)))
            ctx.state["field"] = [float(word) for word in line.split()]

    def close(state):
        if "program" in state:
            state["program"].close()

If the gang ends (the environment is closed, a step takes too long, a rank dies), the program
and everything that it has started are killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ali.executables import process
from mpi_workers.failures import Failure

if TYPE_CHECKING:
    from ali.interface import Context

POLL_INTERVAL_S = 0.2  # between checks whether the call has failed on another rank


class LineProgram:
    """A running program with pipes to its standard input and output.

    Parameters
    ----------
    command : sequence of str
        A serial program, or ``mpiexec -n N program`` for one on the CPUs of this node (request
        them with the environment's ``cpus_per_worker``).
    folder : path, optional
        Its working directory, for programs that read and write files.
    environment : mapping, optional
        Variables to add.

    Raises
    ------
    Failure
        LibraryLoadError, if the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._name = command[0]
        try:
            self._process = subprocess.Popen(
                list(command), cwd=folder, env=process.environment(environment or {}),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            raise Failure("LibraryLoadError", f"cannot start {command[0]!r}: {error}") from None
        self._buffer = b""
        self._late = 0  # answers to questions whose wait was interrupted
        self._noted = False

    @property
    def running(self) -> bool:
        """Whether the program has not ended."""
        return self._process.poll() is None

    def ask(self, ctx: Context, line: str) -> str:
        """Send a line; return the next line of the program's output.

        Raises
        ------
        Failure
            RoutineError with the end of its standard error, if the program has ended.
        Interrupted
            If the call has failed on another rank or was cancelled.
        """
        while self._late:  # not the answer to this question
            self.read(ctx)
            self._late -= 1
        self.tell(line)
        self._late += 1
        found = self.read(ctx)
        self._late -= 1
        return found

    def tell(self, line: str) -> None:
        """Send a line. Raises as `ask`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except OSError:
            raise self._ended() from None

    def read(self, ctx: Context) -> str:
        """The next line of the program's output. Raises as `ask`."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ctx.check()
            if select.select([output], [], [], POLL_INTERVAL_S)[0]:
                data = os.read(output, 1 << 16)
                if not data:
                    raise self._ended()
                self._buffer += data
        if not self._noted:  # it has initialised MPI by now
            ctx.gang.note_programs()
            self._noted = True
        found, _, self._buffer = self._buffer.partition(b"\n")
        return found.decode(errors="replace")

    def _ended(self) -> Failure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(process.END_TIMEOUT_S)
        said = process.end_of(self._errors)
        code = self._process.poll()
        return Failure("RoutineError", f"{self._name!r} has ended with code {code}{said}")

    def close(self) -> None:
        """Close its input, and kill it if it does not end by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            try:
                self._process.wait(process.END_TIMEOUT_S)
            finally:  # also of a call that is cancelled meanwhile
                self._process.kill()
                self._errors.close()
                self._process.wait(process.REAP_S)
