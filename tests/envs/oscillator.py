"""A damped oscillator on MPI, as a simulator that also breaks on purpose, for RLlib's tests.

``sim`` says how: `fault` ("kill", "hang", "raise") strikes in step `at` of an episode, `times`
times in all; the file `marks` counts them, and keeps the count when the gang is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from ali import Context, routine

LENGTH = 20


def load(state: dict[str, Any], path: str | None) -> None:
    state.update(seed=0, k=0, x=0.0, v=0.0, fault="", at=5, times=1, marks="")


@routine()
def setup(ctx: Context, config: str) -> None:
    """Choose what goes wrong, when, and how often."""
    ctx.state.update(json.loads(config))


@routine("spec")
def spec(ctx: Context) -> str:
    """The spec for environments, as JSON."""
    action = {"shape": [1], "low": -1.0, "high": 1.0}
    about = {"observation": {"shape": [2]}, "action": action}
    return json.dumps({**about, "episode_length": LENGTH, "info": ["ranks"]})


@routine()
def seed(ctx: Context, seed: int) -> None:
    """Seed of the next episode."""
    ctx.state["seed"] = seed


@routine()
def reset(ctx: Context) -> None:
    """Somewhere between -1 and 1, at rest."""
    ctx.state.update(x=(ctx.state["seed"] % 2001) / 1000 - 1, v=0.0, k=0)


@routine()
def step(ctx: Context, action: list[float]) -> None:
    """Push with ``action[0]``."""
    s = ctx.state
    s["k"] += 1
    if s["fault"] and s["k"] == s["at"]:
        _break(ctx)
    push = ctx.comm.allreduce(action[0]) / ctx.size
    s["v"] += 0.1 * (push - s["x"] - 0.1 * s["v"])
    s["x"] += 0.1 * s["v"]


def _break(ctx: Context) -> None:
    s = ctx.state
    # Rank 0 decides and counts: the others may be on another node.
    if not ctx.comm.bcast(_counted(Path(s["marks"]), s["times"]) if ctx.rank == 0 else None):
        return
    ctx.comm.Barrier()
    if ctx.rank == ctx.size - 1:
        if s["fault"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if s["fault"] == "raise":
            raise ValueError("the oscillator is broken")
        time.sleep(600)


def _counted(marks: Path, times: int) -> bool:
    """Whether it is to break once more; gangs of several environments may ask at the same time."""
    with marks.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if len(file.read()) >= times:
            return False
        file.write("x")
        return True


@routine("state")
def get_state(ctx: Context) -> list[float]:
    """Position and velocity."""
    return [ctx.state["x"], ctx.state["v"]]


@routine("score")
def get_score(ctx: Context) -> list[float]:
    """The score, and how many ranks there are."""
    return [-(ctx.state["x"] ** 2), float(ctx.size)]
