"""A simulator for tests: a swinging mass, with some noise, whose sums are shared by all ranks.

What breaks on purpose is asked for by the options `setup` gets.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time

import numpy as np

from ali import Context, DistMatrix, routine
from mpi_workers.failures import Failure

OPTIONS = {"length": 20, "agents": 1, "limit": 1.5, "choices": 0, "size": 3, "dtype": "float32"}
FAULTS = {
    "hang_at": 0, "native_hang_at": 0, "raise_at": 0, "exit_at": 0, "on_rank": -1,
    "native_others_at": 0,  # all but on_rank wait in native code
    "deaf_at": 0,  # waits in native code that no signal ends
    "nan_push": None,  # the push after which the state, or the reward, is not finite
    "nan_reward": False,
    "sleep_s": 0.0,
}  # fmt: skip


@routine()
def setup(ctx: Context, config: str) -> None:
    """Take the options."""
    given = json.loads(config)
    unknown = sorted(set(given) - set(OPTIONS) - set(FAULTS))
    if unknown:
        raise Failure("BadArgumentError", f"unknown options {unknown}; there are {sorted(OPTIONS)}")
    ctx.state["options"] = {**OPTIONS, **FAULTS, **given}
    ctx.state["random"] = np.random.default_rng(0)
    ctx.state["steps"] = 0
    reset(ctx)


def simulated(options: dict, random: np.random.Generator) -> np.ndarray:
    """The first state of an episode: angle and speed of each agent."""
    return random.uniform(-0.5, 0.5, (options["agents"], options["size"]))


def moved(options: dict, state: np.ndarray, action: np.ndarray) -> np.ndarray:
    """A time step: the rules, without ranks."""
    push = action.reshape(options["agents"], -1)[:, :1]
    if options["choices"]:
        push = push - options["choices"] // 2
    return state + 0.1 * np.roll(state, 1, axis=1) + 0.1 * push


@routine("spec")
def spec(ctx: Context) -> str:
    """The spec: observations and actions."""
    o = ctx.state["options"]
    many = [o["agents"]] if o["agents"] > 1 else []
    bounds = {"low": -100.0, "high": 100.0} if o["dtype"] == "float32" else {}
    action = {"shape": [*many, 1], "dtype": "float32", "low": -1.0, "high": 1.0}
    return json.dumps(
        {
            "name": "pendulum",
            "observation": {"shape": [*many, o["size"]], "dtype": o["dtype"], **bounds},
            "action": {"n": o["choices"]} if o["choices"] else action,
            "agents": o["agents"],
            "episode_length": o["length"],
            "time_step": 0.1,
            "score": "minus the square of the first angle",
            "info": ["energy", "ranks"],
            "render": {"field": "angle", "low": -1.0, "high": 1.0},
        }
    )


@routine()
def seed(ctx: Context, seed: int) -> None:
    """Restart the random numbers."""
    ctx.state["random"] = np.random.default_rng(seed)


@routine()
def reset(ctx: Context) -> None:
    """A new episode."""
    ctx.state["x"] = simulated(ctx.state["options"], ctx.state["random"])
    ctx.state["push"] = None


@routine()
def step(ctx: Context, action: list[float]) -> None:
    """A time step, in which the ranks agree."""
    o = ctx.state["options"]
    ctx.state["steps"] += 1
    n = ctx.state["steps"]
    time.sleep(o["sleep_s"])
    if n == o["native_others_at"] and o["on_rank"] != ctx.rank:
        ctypes.PyDLL(None).pause()
        ctypes.PyDLL(None).sleep(3600)
    if o["on_rank"] in (-1, ctx.rank):
        if n == o["hang_at"]:
            while True:
                time.sleep(60)
        if n == o["deaf_at"]:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            ctypes.PyDLL(None).sleep(3600)
        if n == o["native_hang_at"]:
            ctypes.PyDLL(None).pause()  # no signal handler of Python's ever runs
            ctypes.PyDLL(None).sleep(3600)
        if n == o["raise_at"]:
            raise ArithmeticError(f"the mass flew off in step {n}")
        if n == o["exit_at"]:
            os._exit(7)
    ctx.state["push"] = action[0]
    x = moved(o, ctx.state["x"], np.array(action))
    ctx.state["x"] = ctx.comm.allreduce(x / ctx.size) if ctx.size > 1 else x


@routine("state")
def get_state(ctx: Context) -> list[float]:
    """Angles and speeds."""
    o, x = ctx.state["options"], ctx.state["x"].ravel()
    pushed = o["nan_push"] is not None and o["nan_push"] == ctx.state["push"]
    broken = pushed and not o["nan_reward"]
    if o["dtype"] == "uint8":
        return np.full(x.shape, 300.0) if broken else np.round(np.clip(x, -1, 1) * 100 + 128)
    return np.full(x.shape, np.nan) if broken else x


@routine("score")
def get_score(ctx: Context) -> list[float]:
    """The reward of each agent, the energy, and how many ranks compute this."""
    o, x = ctx.state["options"], ctx.state["x"]
    reward = -(x[:, 0] ** 2)
    if o["nan_reward"] and o["nan_push"] == ctx.state["push"]:
        reward = reward * np.inf
    return [*reward, (x**2).sum(), ctx.size]


@routine("over")
def is_terminated(ctx: Context) -> bool:
    """Whether it has swung too far."""
    return bool(abs(ctx.state["x"]).max() > ctx.state["options"]["limit"])


@routine("field")
def render(ctx: Context) -> DistMatrix:
    """The state as a field of 4 rows."""
    return ctx.new_replicated(np.tile(ctx.state["x"].ravel(), (4, 1)), "VC_STAR")


@routine("state")
def save_state(ctx: Context) -> DistMatrix:
    """The state."""
    return ctx.new_replicated(ctx.state["x"].copy(), "VC_STAR")


@routine()
def load_state(ctx: Context, state: DistMatrix) -> None:
    """Go back."""
    if state.shape[0] != len(ctx.state["x"]):
        raise Failure("BadArgumentError", f"a state of shape {state.shape}")
    ctx.state["x"] = ctx.to_layout(state, "STAR_STAR").local.copy()
