"""A simulator that is an unmodified MPI program (solver.c), started and asked on rank 0."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ali import Context, routine
from ali.executables.line_program import LineProgram


@routine()
def setup(ctx: Context, command: str) -> None:
    """The program, as JSON."""
    ctx.state.update(command=json.loads(command), program=None, numbers=[0.0, 0.0])


def _ask(ctx: Context, line: str) -> None:
    if ctx.rank == 0:
        ctx.state["numbers"] = [float(word) for word in ctx.state["program"].ask(ctx, line).split()]


@routine("spec")
def spec(ctx: Context) -> str:
    """The spec."""
    action = {"shape": [1], "low": -100, "high": 100}
    return json.dumps({"observation": {"shape": [1]}, "action": action, "info": ["size"]})


@routine()
def seed(ctx: Context, seed: int) -> None:
    """The first value of an episode."""
    ctx.state["seed"] = seed


@routine()
def reset(ctx: Context) -> None:
    """Begin an episode; start the program if it does not run."""
    if ctx.rank == 0 and (ctx.state["program"] is None or not ctx.state["program"].running):
        ctx.state["program"] = LineProgram(ctx.state["command"])
    _ask(ctx, f"reset {ctx.state['seed'] % 10}")


@routine()
def step(ctx: Context, action: list[float]) -> None:
    """A time step of the program."""
    _ask(ctx, f"step {action[0]!r}")


@routine("x")
def get_state(ctx: Context) -> list[float]:
    """The value."""
    return np.array(ctx.state["numbers"][:1])


@routine("score")
def get_score(ctx: Context) -> list[float]:
    """Minus the value, ranks of the program."""
    return [-ctx.state["numbers"][0], ctx.state["numbers"][1]]


def close(state: dict[str, Any]) -> None:
    """End the program."""
    if state.get("program") is not None:
        state["program"].close()
