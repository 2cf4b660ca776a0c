"""A simulator for tests whose observation and action have parts: what it was given, it shows."""

from __future__ import annotations

import json

import numpy as np

from ali import Context, routine

SPACES = {
    "observation": {
        "dict": {
            "picture": {"shape": [2, 3], "dtype": "uint8"},
            "speed": {"shape": [2], "dtype": "float64", "low": -10, "high": 10},
            "gear": {"n": 4},
            "both": {"tuple": [{"nvec": [2, 3]}, {"shape": [], "low": 0, "high": 9}]},
        }
    },
    "action": {
        "tuple": [
            {"dict": {"force": {"shape": [2], "low": -1, "high": 1}, "gear": {"n": 4}}},
            {"nvec": [2, 3]},
        ]
    },
}


@routine()
def setup(ctx: Context, config: str) -> None:
    """Options: other spaces, and agents."""
    spaces = {**SPACES, **json.loads(config)}
    ctx.state.update(spaces=spaces, agents=spaces.get("agents", 0))
    reset(ctx)


@routine("spec")
def spec(ctx: Context) -> str:
    """The spec."""
    return json.dumps({**ctx.state["spaces"], "episode_length": 4})


@routine()
def reset(ctx: Context) -> None:
    """Zeros."""
    ctx.state["numbers"] = np.zeros(2 * ctx.state["agents"] or 5)


@routine()
def step(ctx: Context, action: list[float]) -> None:
    """Keep the action."""
    ctx.state["numbers"] = np.array(action)


@routine("state")
def get_state(ctx: Context) -> list[float]:
    """The parts of the observation, one after another; the action itself if there are agents."""
    if ctx.state["agents"]:
        return ctx.state["numbers"]
    force, gear, valves = np.split(ctx.state["numbers"], [2, 3])
    return [*range(250, 256), *(10 * force), *gear, *valves, ctx.rank + ctx.size]


@routine("score")
def get_score(ctx: Context) -> list[float]:
    """The gear, or the gears of agents."""
    agents = ctx.state["agents"]
    return ctx.state["numbers"][-agents:] if agents else [ctx.state["numbers"][2]]
