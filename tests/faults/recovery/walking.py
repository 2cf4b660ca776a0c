"""A library with a state that can be saved: a field, and how often it was changed."""

from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np

from ali import Context, DistMatrix, routine


def load(state: dict[str, Any], path: str | None) -> None:
    """The state before the first call."""
    state.update(steps=0, notes=[])


def _field(ctx: Context) -> DistMatrix:
    if "field" not in ctx.state:
        ctx.state["field"] = ctx.zeros((50, 4), "float64", "VC_STAR")
    return ctx.state["field"]


@routine("steps", writes=())
def step(ctx: Context, A: DistMatrix, seconds: float = 0.0) -> int:
    """Add A to the field; how often that was done."""
    time.sleep(seconds)
    _field(ctx).local[...] += ctx.to_layout(A, "VC_STAR").local
    ctx.state["steps"] += 1
    ctx.state["notes"].append(ctx.rank)
    return int(ctx.state["steps"])


@routine("steps", "F", pure=True)
def look(ctx: Context) -> tuple[int, DistMatrix]:
    """How often it was changed, and a copy of the field."""
    F = ctx.empty_like(_field(ctx))
    F.local[...] = _field(ctx).local
    return ctx.state["steps"], F


@routine("notes", pure=True)
def notes(ctx: Context) -> list[int]:
    """The ranks that have noted each step, of all ranks one after another."""
    found = ctx.comm.allgather(ctx.state["notes"])
    return [rank for mine in found for rank in mine]


@routine(writes=())
def stumble(ctx: Context) -> None:
    """Change the state on rank 0, then fail."""
    if ctx.rank == 0:
        ctx.state["steps"] = 1000
    ctx.comm.Barrier()
    raise ValueError("half done")


@routine("steps", "notes", "field")
def save_state(ctx: Context) -> tuple[int, bytes, DistMatrix]:
    """What `load_state` takes."""
    notes = ctx.comm.allgather(ctx.state["notes"])
    return ctx.state["steps"], pickle.dumps(notes), _field(ctx)


@routine()
def load_state(ctx: Context, steps: int, notes: bytes, field: DistMatrix) -> None:
    """Continue there, on any number of ranks."""
    of_ranks = pickle.loads(notes)
    mine = [note for rank, found in enumerate(of_ranks) if rank % ctx.size == ctx.rank
            for note in found]  # fmt: skip
    ctx.state.update(steps=steps, notes=mine)
    own = ctx.to_layout(field, "VC_STAR")
    copy = ctx.empty_like(own)
    copy.local[...] = own.local
    ctx.state["field"] = copy
    assert np.shares_memory(_field(ctx).local, copy.local) or not copy.local.size
