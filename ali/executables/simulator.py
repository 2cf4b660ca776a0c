"""The library ``program``: a simulator that is an MPI program, whose processes are the ranks.

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

import json
from typing import Any

import numpy as np

from ali.executables.stepped_program import SteppedProgram
from ali.interface import Context, routine
from ali.simulator.spec import Spec, parse
from mpi_workers.failures import Failure

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
    argv, unknown = options.get("argv"), sorted(set(options) - set(KEYS))
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
    usable = ctx.comm.allreduce(program is not None and program.running) == ctx.size
    if program is not None and not usable:
        program.end()
    elif program is not None and options.get("per_episode"):
        program.close()
    if not usable or options.get("per_episode"):
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
