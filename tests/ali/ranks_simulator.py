"""Rank side of test_simulator.py."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from ali.interface import Context
from ali.registry import load
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.local import local_gang
from mpi_workers.rank.gang_view import GangView
from tests.support.ranks_shared import failure_of

SIZE = 4


class Host:
    """The shipped library "simulator" on this rank."""

    def __init__(self, gang: GangView) -> None:
        self._gang = gang
        self._library = load("simulator")

    def call(self, routine: str, **arguments: Any) -> Any:
        values = self._library.call(self._gang, routine, arguments)
        return values[0] if len(values) == 1 else values

    def attach(self, path: str, config: str = "{}", copies: int = 1) -> Any:
        given = {"name": "spring", "path": path, "config": config, "copies": copies}
        return json.loads(self.call("attach", **given))

    def begin(self, which: list[int], seeds: list[int]) -> list[list[float]]:
        return self._table(self.call("begin", which=which, seeds=seeds))

    def advance(
        self, actions: Any, which: list[int] | None = None, seeds: list[int] | None = None
    ) -> list[list[float]]:
        raw = np.asarray(actions, float).tobytes()
        return self._table(self.call("advance", actions=raw, which=which, seeds=seeds))

    def _table(self, raw: bytes) -> list[list[float]]:
        layout = [("scores", float, 3), ("x", np.float32, SIZE)]
        table = np.frombuffer(raw, np.dtype(layout, align=True))
        rows: list[list[float]] = np.hstack([table["x"], table["scores"]]).tolist()
        return rows if self._gang.rank == 0 else []


def one(gang: GangView, path: str) -> dict[str, Any]:
    """A simulation on all ranks: an episode, what is refused, a second simulator."""
    host = Host(gang)
    before = failure_of(host.begin, [0], [0])
    spec = host.attach(path)
    first = host.begin([0], [2])
    second = host.advance([[0.5, 1.0]])
    bad = [
        failure_of(host.advance, [[1.0, np.nan]]),
        failure_of(host.advance, [[1.0, 2.0, 3.0]]),
        failure_of(host.begin, [1], [0]),
        failure_of(host.begin, [0], []),
        failure_of(host.call, "render", copy=1),
        failure_of(host.call, "save_state"),
        failure_of(host.attach, path, copies=0),
    ]
    third = host.advance([[0.5, 1.0]])
    height, width, raw = host.call("render", copy=0)
    field = np.frombuffer(raw, np.float32).reshape(height, width).tolist() if raw else None
    fresh = host.attach(path)
    return {
        "before": before,
        "spec": spec,
        "records": [first, second, third],
        "bad": bad,
        "same everywhere": len({str(each) for each in gang.comm.allgather(bad)}) == 1,
        "field": field,
        "again": [fresh == spec, host.begin([0], [2])],
    }


def many(gang: GangView, path: str, copies: int) -> dict[str, Any]:
    """Copies that are distributed over the ranks; some start again while others continue."""
    host = Host(gang)
    host.attach(path, copies=copies)
    seeds = list(range(copies))
    actions = np.arange(2.0 * copies).reshape(copies, 2)
    records = [host.begin(seeds, seeds), host.advance(actions), host.advance(actions, [1], [5])]
    shown = [host.call("render", copy=copy) for copy in seeds]
    fields = [np.frombuffer(raw, np.float32).tolist()[:SIZE] for _, _, raw in shown if raw]
    return {"records": records, "fields": fields}


def failing(gang: GangView, path: str, copies: int) -> dict[str, Any]:
    """A step that fails on one rank: the others leave; a fresh communicator makes it whole."""
    host = Host(gang)
    host.attach(path, '{"fail_at": 2}', copies)
    which, seeds = list(range(copies)), [0] * copies
    actions = np.ones((copies, 2))
    host.begin(which, seeds)
    host.advance(actions)
    gang.comm.Barrier()
    told = ""
    try:
        host.advance(actions)
    except Failure as failure:
        told = failure.message
        time.sleep(1.0)  # until the others are in the step as well
        local_gang.interrupt(1)  # as the proxy would
    except Interrupted:
        told = "left"
    local_gang.begin(2)
    gang.renew()
    said = gang.comm.allgather(told)
    return {"said": said, "after": [host.begin(which, seeds), host.advance(actions)]}


def context(gang: GangView) -> list[Any]:
    """A part of a gang is a gang: its ranks, its matrices."""
    part = gang.part(gang.rank % 2)
    ctx = Context(part, {})
    rows = np.arange(3.0 * 2).reshape(3, 2)[ctx.rank :: ctx.size]
    matrix = ctx.new_from_rows(rows, 3)
    whole = ctx.to_layout(matrix, "STAR_STAR").local.tolist()
    part.renew()
    return [[r, s, w] for r, s, w in gang.comm.allgather([ctx.rank, part.comm.size, whole])]


SIMULATOR = """
import json
from pathlib import Path
from ali import Context, DistMatrix, routine

@routine()
def setup(ctx: Context, config: str) -> None:
    ctx.state.update(json.loads(config))

@routine("spec")
def spec(ctx: Context) -> str:
    return json.dumps({"observation": {"shape": [ctx.size]}, "action": ctx.state["action"]})

@routine()
def reset(ctx: Context) -> None: ...

@routine()
def step(ctx: Context, action: list[float]) -> None: ...

@routine("x")
def get_state(ctx: Context) -> list[float]:
    return [0.0] * ctx.size

@routine("score")
def get_score(ctx: Context) -> list[float]:
    return [0.0]

@routine("state")
def save_state(ctx: Context) -> DistMatrix:
    return ctx.zeros((), "float64")

@routine()
def load_state(ctx: Context, state: DistMatrix) -> None:
    assert state.array_shape == ()

def close(state):
    if state:
        with open(state["log"], "a") as log:
            log.write("closed ")
        raise OSError("cannot be closed")
"""


def closings(gang: GangView, folder: str) -> list[list[str]]:
    """What was closed after a wrong spec, and of copies whose close raises; the errors."""
    path, host = Path(folder, "closing.py"), Host(gang)
    told: list[list[str]] = []
    path.write_text(SIMULATOR)
    for copies, action in ((1, {"shape": "wrong"}), (3, {"shape": [1], "low": -1, "high": 1})):
        log = Path(folder, f"log{copies}")
        config = json.dumps({"log": str(log), "action": action})
        try:
            host.attach(str(path), config, copies)
            host.attach(str(path), config, copies)
        except (Failure, OSError) as error:
            told.append([str(error), *(log.read_text() if log.exists() else "").split()])
    return told


def different(gang: GangView, folder: str) -> str:
    """What a simulator is refused with whose record depends on the number of ranks of a copy."""
    path = Path(folder, "closing.py")
    if gang.rank == 0:
        path.write_text(SIMULATOR)
    gang.comm.Barrier()
    action = {"shape": [1], "low": -1, "high": 1}
    config = json.dumps({"log": str(Path(folder, "log")), "action": action})
    return failure_of(Host(gang).attach, str(path), config, 2)


def number(gang: GangView, folder: str) -> list[Any]:
    """Shape and dtype of a copy's state that is a number; it is restored."""
    path, host = Path(folder, "closing.py"), Host(gang)
    path.write_text(SIMULATOR)
    host.attach(str(path), json.dumps({"log": str(path), "action": {"shape": [1]}}))
    shape, dtype, elements = host.call("save_copy", copy=0)
    host.call("load_copy", copy=0, shape=shape, dtype=dtype, elements=elements)
    return [shape, dtype]
