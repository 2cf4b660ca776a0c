"""`AlchemistSession.trace` and `AlchemistSession.profile`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession, cli
from alchemist_ray.errors import RoutineError
from alchemist_ray.observe import timeline


def late(comm: Any) -> int:
    """Rank 0 waits for the last rank in MPI."""
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
    comm.Barrier()
    return int(comm.size)


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_a_trace_has_a_row_per_rank_and_the_transfers(
    session: AlchemistSession, tmp_path: Path
) -> None:
    begun = time.time()
    A = session.send_matrix(np.ones((500, 40)))
    session.load_library("linalg").norm(A)
    session.run(late)
    A.fetch()
    path = session.trace(tmp_path / "trace.json", last_s=time.time() - begun)
    found = spans(path)
    ranks = {event["tid"] for event in found if event["name"] == "linalg.norm" and event["pid"] < 0}
    assert ranks == set(range(len(session.list_workers())))
    for event in found:
        assert begun - 1 <= event["ts"] / 1e6 <= time.time()
        assert 0 <= event["dur"] < 60e6
    sent = [event for event in found if event["name"] == "send" and event["cat"] == "transfer"]
    assert sent[-1]["args"]["nbytes"] == 160_000
    assert any(event["name"] == "fetch" for event in found)
    names = {
        e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if "M" in e["ph"]
    }
    assert {"rank 0", "rank 1", "MainThread"} <= names


def test_the_time_in_mpi_is_that_of_the_ranks_that_wait(session: AlchemistSession) -> None:
    with session.profile() as profile:
        session.run(late)
    by_rank = {one.rank: one.entries for one in profile.ranks}
    (first,) = (e for e in by_rank[0] if e.name == late.__name__)
    (last,) = (e for e in by_rank[max(by_rank)] if e.name == late.__name__)
    assert 0.25 < first.mpi_s <= first.seconds < 5
    assert last.mpi_s < 0.1 + (last.seconds - 0.3)
    table = str(profile).splitlines()
    assert table[0].split() == ["call", "rank", "calls", "s", "in", "MPI", "memory"]
    assert sum(line.startswith("late ") for line in table) == len(by_rank)


def test_memory_and_failures_are_seen(session: AlchemistSession) -> None:
    def grows(comm: Any) -> None:
        np.ones(20_000_000)
        raise ValueError("after that")

    with session.profile() as profile, pytest.raises(RoutineError):
        session.run(grows)
    for one in profile.ranks:
        (entry,) = (e for e in one.entries if e.name.endswith("grows"))
        assert entry.failed
        assert entry.grown_nbytes > 100e6


def test_keeping_the_history_costs_little() -> None:
    begun = time.perf_counter()
    for _ in range(10_000):
        timeline.add("command", "command", timeline.now())
    assert (time.perf_counter() - begun) / 10_000 < 50e-6


def test_a_folder_that_is_not_there_is_named(session: AlchemistSession, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        session.trace(tmp_path / "absent" / "trace.json")


def test_the_command_writes_the_trace_of_a_gang_with_a_name(
    cluster: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with AlchemistSession(2, name="traced") as session:
        session.run(late)
        assert cli.main(["trace", "traced"]) == 0
        assert "traced.json: open it at https://ui.perfetto.dev" in capsys.readouterr().out
        assert {e["tid"] for e in spans(tmp_path / "traced.json") if e["name"] == "late"} == {0, 1}
        assert cli.main(["trace", "traced", "--out", "absent/trace.json"]) == 1
        assert "the trace cannot be written" in capsys.readouterr().err
    assert cli.main(["trace", "traced"]) == 1
    assert "there is no gang 'traced'" in capsys.readouterr().err
