"""An MPI program whose processes are the ranks, and which a simulator asks step by step.

Also the library ``program``, a simulator that is such a program.

A simulator in Python starts the program, which is not modified, and translates::

    from ali.executables.stepped_program import SteppedProgram

    @routine()
    def reset(ctx: Context) -> None:
        ctx.state["program"] = SteppedProgram(ctx, ["./solver", "-i", "in.dat"])

    @routine()
    def step(ctx: Context, action: list[float]) -> None:
        line = ctx.state["program"].ask("step " + " ".join(map(repr, action)))
        ctx.state["field"] = [float(word) for word in line.split()]  # of rank 0

The library ``program`` does so for programs that speak its protocol.

Rank 0 of the program reads commands from its standard input, a line each, and answers on its
standard output with a line of numbers:

| command | answer |
|---|---|
| ``reset SEED`` | the observation |
| ``step A1 A2 ...`` | observation, reward per agent, numbers of ``info``, 1 at the end, else 0 |
| end of file | none: the program ends |

With ``"binary": true`` an answer is as many float64 in the machine's byte order, without a newline.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ali.executables.process import END_TIMEOUT_S, end_of, ready
from ali.executables.program import Program
from ali.interface import Context, routine
from ali.simulator.spec import Spec, parse
from mpi_workers.failures import Failure, Interrupted

ANSWERED = 32001  # tag of rank 0's messages: it has the answer
POLL_INTERVAL_S = 0.0002  # between looks for this message; doubles up to the limit
LOOK_LIMIT_S = 0.02
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
        BadArgumentError, if it cannot be started; ResourceError, if MPI has no communicator left.
    Interrupted
        If the call has failed on another rank or was cancelled.

    Attributes
    ----------
    over : bool
        Whether it has been ended on this rank.
    """

    def __init__(
        self,
        ctx: Context,
        argv: Sequence[str],
        folder: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._rank, self._size = ctx.rank, ctx.size
        ctx.comm.Barrier()  # unlike the next line, it ends if another rank has failed
        self._comm = ctx.gang.duplicate()  # between questions, ranks may wait on it for the others
        self._name = os.path.basename(argv[0])
        self._buffer = bytearray()
        self._output = self._input = -1
        self.over = False
        self._closing = contextlib.ExitStack()
        self._errors = self._closing.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        task = {
            "name": self._name,
            "argv": list(argv),
            "env": dict(environment or {}),
            "cwd": None if folder is None else os.fspath(folder),
            "cwd_needed": True,
            "check": True,
        }
        try:
            with contextlib.ExitStack() as theirs:
                streams = self._pipes(theirs)
                self._program = Program(ctx.gang, self._comm, task, {}, self._closing, **streams)
        except BaseException:
            self.end()
            raise
        if self._rank == 0:
            self._program.serve[self._output] = self._receive

    def _pipes(self, theirs: contextlib.ExitStack) -> dict[str, int]:
        if self._rank != 0:
            return {"stderr": self._errors.fileno()}
        (stdin, self._input), (self._output, stdout) = os.pipe(), os.pipe()
        with contextlib.suppress(OSError):  # this user has as many large pipes as allowed
            fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, PIPE)
        os.set_blocking(self._input, False)
        for fd in (stdin, stdout):
            theirs.callback(os.close, fd)
        self._closing.callback(os.close, self._output)
        return {"stdin": stdin, "stdout": stdout, "stderr": self._errors.fileno()}

    @property
    def running(self) -> bool:
        """Whether the process of this rank may be asked."""
        return not self.over and not self._program.ended

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
        self._comm.Free()
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
        if self.over:
            raise Failure("RoutineError", f"program {self._name} has been ended: start another")
        try:
            yield
        except Failure as error:
            message = f"{error.message}{end_of(self._errors)}"
            self.end()
            raise Failure(error.kind, message, **error.facts) from None
        except BaseException:
            self.end()
            raise

    def _watch(self) -> None:
        """Serve this rank's process until rank 0 has its answer.

        A rank may be late: rank 0 does not wait for it.
        """
        interval_s = POLL_INTERVAL_S
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
                if self._program.turn(POLL_INTERVAL_S) is not None or self._program.ended:
                    return
            except OSError:  # it has closed its input: its end is noticed next
                return

    def _receive(self) -> bool:
        data = os.read(self._output, PIPE)
        self._buffer += data
        return bool(data)

    def close(self) -> None:
        """Close its input, and kill it if it does not end by itself."""
        self._close_input()
        deadline = time.monotonic() + END_TIMEOUT_S
        try:
            while not self.over and time.monotonic() < deadline:
                if self._program.turn(LOOK_LIMIT_S) is not None:
                    self._comm.Free()  # else messages on it may be under way
                    break
        except (Failure, Interrupted):
            return  # it is over
        finally:
            self.end()

    def end(self) -> None:
        """Kill this rank's process and what it has started. May be called twice; not collective."""
        self.over = True
        self._close_input()
        self._closing.close()

    def _close_input(self) -> None:
        if self._input >= 0:
            os.close(self._input)
            self._input = -1


KEYS = ("argv", "spec", "folder", "environment", "binary", "per_episode")


@routine()
def setup(ctx: Context, config: str) -> None:
    """The program.

    Parameters
    ----------
    config : string
        JSON: ``argv`` (the executable and its arguments), ``spec`` (of simulators), and optionally
        ``folder`` (working directory), ``environment`` (variables to add), ``binary`` (of
        answers), ``per_episode`` (whether every reset starts the program again).

    Raises
    ------
    BadArgumentError
        For missing or unknown keys.
    """
    options = json.loads(config)
    argv = options.get("argv")
    unknown = sorted(set(options) - set(KEYS))
    words = isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv)
    if unknown or not words or not isinstance(options.get("spec"), dict):
        raise Failure(
            "BadArgumentError",
            "'sim' of the simulator 'program' needs 'argv', a list of strings, and 'spec', an "
            f"object; it may have {', '.join(KEYS[2:])}; got {config}",
        )
    text = json.dumps(options["spec"])
    ctx.state.update(options=options, spec=parse("program", text), program=None, seed=0)


@routine("spec")
def spec(ctx: Context) -> str:
    """The spec, as `setup` got it."""
    return json.dumps(ctx.state["options"]["spec"])


@routine()
def seed(ctx: Context, seed: int) -> None:
    """The number that the next ``reset`` passes on."""
    ctx.state["seed"] = seed


@routine()
def reset(ctx: Context) -> None:
    """Start the program if it does not run, and begin an episode.

    Raises
    ------
    RoutineError
        With the end of its standard error, if the program ends.
    """
    state, options = ctx.state, ctx.state["options"]
    program: SteppedProgram | None = state["program"]
    # None: there is no program on that rank, or it has been ended.
    running = ctx.comm.allgather(program.running if program and not program.over else None)
    again = not all(running) or options.get("per_episode")
    if program is not None and None in running:
        program.end()
    elif program is not None and again:
        program.close()
    if again:
        state["program"] = SteppedProgram(
            ctx, options["argv"], options.get("folder"), options.get("environment")
        )
    _ask(ctx, f"reset {state['seed']}", state["spec"].observations)
    state["scores"], state["over"] = np.zeros(state["spec"].scores), False


@routine()
def step(ctx: Context, action: list[float]) -> None:
    """A step of the program.

    Raises
    ------
    RoutineError
        With the end of its standard error, if the program ends.
    """
    sizes: Spec = ctx.state["spec"]
    line = " ".join(["step", *map(repr, action)])
    rest = _ask(ctx, line, sizes.observations, sizes.scores + 1)
    ctx.state["scores"], ctx.state["over"] = rest[:-1], bool(len(rest) and rest[-1])


@routine("observation")
def get_state(ctx: Context) -> list[float]:
    """The observation, on rank 0."""
    observation: list[float] = ctx.state["observation"]
    return observation


@routine("scores")
def get_score(ctx: Context) -> list[float]:
    """The rewards and the numbers of ``info``, on rank 0."""
    scores: list[float] = ctx.state["scores"]
    return scores


@routine("over")
def is_terminated(ctx: Context) -> bool:
    """Whether the episode has ended, on rank 0."""
    return bool(ctx.state["over"])


def _ask(ctx: Context, line: str, observed: int, more: int = 0) -> np.ndarray[Any, Any]:
    """Send a command, keep the observation of the answer, and return its other numbers."""
    program: SteppedProgram = ctx.state["program"]
    count = observed + more
    answer: bytes | str = ""
    try:
        if ctx.state["options"].get("binary"):
            answer = program.ask_bytes(line, 8 * count)
            numbers = np.frombuffer(answer)
        else:
            answer = program.ask(line)
            numbers = np.array(answer.split(), np.float64)
        if ctx.rank == 0 and len(numbers) != count:
            raise ValueError(f"{len(numbers)} numbers")
    except ValueError as error:
        program.end()  # its next answer may not be one to the next command
        more_words = f" and {more} of rewards, info and end" if more else ""
        raise Failure(
            "RoutineError",
            f"the program answered {line.split()[0]!r} with {answer[:200]!r} ({error}); the spec "
            f"needs {observed} numbers for the observation{more_words}",
        ) from None
    ctx.state["observation"] = numbers[:observed]
    return numbers[observed:]


def close(state: dict[str, Any]) -> None:
    """End the program. Collective."""
    if state.get("program") is not None:
        state["program"].close()
