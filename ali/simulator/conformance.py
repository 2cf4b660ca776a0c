"""Rank side of `ali.testing_simulators`: episodes of a simulator, as digests of its records."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ali import registry
from ali.interface import Context
from ali.simulator.host import Simulations

if TYPE_CHECKING:
    from mpi_workers.rank.gang import Gang


def episodes(
    gang: Gang, name: str, path: str | None, sim: str, seeds: list[int], steps: int, copies: int
) -> dict[str, Any]:
    """Run episodes one after another, each with the same random actions.

    Returns
    -------
    dict
        ``spec``; ``records``: for each episode and step, a digest of each copy's record;
        ``faults``: what is wrong with the numbers; ``restored``: whether a saved state led to the
        same records, None if the simulator has none.
    """
    ctx = Context(gang, {})
    host = Simulations(ctx, lambda: registry.load(name, path), name, sim, copies)
    spec = json.loads(host.spec.text)
    faults: list[str] = []
    digests: list[list[list[str]]] = []

    def kept(raw: bytes, which: str) -> list[str]:
        table = np.frombuffer(raw, host.spec.layout)
        for field in host.spec.layout.names or ():
            if not np.isfinite(table[field]).all():
                faults.append(f"{which}: {field} is not finite")
        return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in table]

    for number, seed in enumerate(seeds):
        random = np.random.default_rng(7)
        copy_seeds = {copy: seed + copy for copy in range(copies)}
        nothing = np.empty((0, host.spec.actions))
        episode = [kept(host.run(ctx, copy_seeds, nothing), f"episode {number}, reset")]
        for step in range(steps):
            actions = np.tile(_action(spec["action"], spec["agents"], random), (copies, 1))
            episode.append(kept(host.run(ctx, {}, actions), f"episode {number}, step {step}"))
        digests.append(episode)
    restored = None
    if copies == 1 and host.has("save_state") and host.has("load_state"):
        action = _action(spec["action"], spec["agents"], np.random.default_rng(8))[None]
        state = host.save(ctx)
        first = kept(host.run(ctx, {}, action), "after save_state")
        host.run(ctx, {}, action)
        host.load(ctx, state)
        restored = first == kept(host.run(ctx, {}, action), "after load_state")
    seeded = host.has("seed")
    host.close()
    return {
        "spec": spec, "records": digests, "faults": faults, "restored": restored, "seeded": seeded,
    }  # fmt: skip


def _action(space: dict[str, Any], agents: int, random: np.random.Generator) -> Any:
    """A random action of all agents within the bounds."""
    if "dict" in space or "tuple" in space:
        parts = space["dict"].values() if "dict" in space else space["tuple"]
        return np.concatenate([_action(part, agents, random) for part in parts])
    if "n" in space or "nvec" in space:
        counts = np.tile(space.get("nvec", [space.get("n")]), agents)
        return np.floor(random.random(len(counts)) * counts)
    size = int(np.prod(space["shape"]))
    low, high = (np.resize(0.0 if x is None else x, size) for x in (space["low"], space["high"]))
    low = low if space["low"] is not None else high - 1.0
    high = high if space["high"] is not None else low + 1.0
    return random.uniform(low, high)
