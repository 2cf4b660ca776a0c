"""`AlchemistSession.trace` and `AlchemistSession.profile`."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ali
from alchemist_ray import AlchemistSession, cli
from alchemist_ray.errors import RoutineError
from alchemist_ray.measures import events
from mpi_workers.rank import history
from mpi_workers.waits import interruption
from tests.support.build import needs_compiler, shared_object


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
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if "M" in event["ph"]}
    assert {"rank 0", "rank 1", "MainThread"} <= names


def test_the_time_in_mpi_is_that_of_the_ranks_that_wait(session: AlchemistSession) -> None:
    with session.profile() as profile:
        session.run(late)
    by_rank = {one.rank: one.entries for one in profile.ranks}
    (first,) = (e for e in by_rank[0] if e.name == late.__name__)
    (last,) = (e for e in by_rank[max(by_rank)] if e.name == late.__name__)
    assert last.begun + 0.25 - first.begun < first.mpi_s <= first.seconds
    assert last.mpi_s < last.seconds - 0.25
    table = str(profile).splitlines()
    assert table[0].split() == ["call", "rank", "calls", "s", "in", "MPI", "memory"]
    assert sum(line.startswith("late ") for line in table) == len(by_rank)
    without_with = str(session.profile()).splitlines()
    assert sum(line.startswith("late ") for line in without_with) == len(by_rank)


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


LIBRARY = """
#include <alchemist.h>
static int work(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)in, (void)out;
    alchemist_span_begin(call, "assemble");
    alchemist_span_begin(call, "inner");
    alchemist_span_end(call);
    alchemist_span_end(call);
    alchemist_span_end(call); /* too many */
    alchemist_span_begin(call, "solve");
    return alchemist_fail(call, "no convergence");
}
static const alchemist_routine routines[] = {{"work", "Fails.", work, NULL, NULL}, {0}};
ALCHEMIST_LIBRARY("phases", "Spans.", routines)
"""


def test_spans_of_a_library_in_python(session: AlchemistSession, tmp_path: Path) -> None:
    def phases(comm: Any) -> None:
        ctx = ali.context()
        with ctx.span("assemble"):
            time.sleep(0.1)
            with ctx.span("inner"):
                time.sleep(0.05 * comm.rank)
                comm.Barrier()
        with ctx.span("fails"):
            raise ValueError

    begun = time.time()
    with session.profile() as profile, pytest.raises(RoutineError):
        session.run(phases)
    found = spans(session.trace(tmp_path / "trace.json", last_s=time.time() - begun))
    for rank in range(2):
        here = [e for e in found if (e["pid"] < 0, e["tid"]) == (True, rank)]
        one = {e["name"].rpartition(".")[2]: e for e in here}
        assert one["phases"]["cat"] == "rank"
        for inner, outer in (("assemble", "phases"), ("inner", "assemble"), ("fails", "phases")):
            assert one[inner]["cat"] == "span"
            assert one[outer]["ts"] <= one[inner]["ts"]
            assert one[inner]["dur"] <= one[outer]["dur"]
        assert 0.1 <= one["assemble"]["dur"] / 1e6 < 5
        assert 0 <= one["inner"]["args"]["mpi_s"] <= one["inner"]["dur"] / 1e6
        assert rank or one["inner"]["args"]["mpi_s"] > 0  # it waits for rank 1
        assert (one["fails"]["args"]["failed"], "failed" in one["inner"]["args"]) == (True, False)
    assert "\n  assemble " in str(profile)


@needs_compiler
def test_spans_of_a_library_in_c_end_with_the_routine(
    session: AlchemistSession, tmp_path: Path
) -> None:
    (tmp_path / "phases.c").write_text(LIBRARY)
    built = shared_object(tmp_path / "phases.c", tmp_path / "libphases.so")
    library = session.load_library("phases", built)
    with session.profile() as profile, pytest.raises(RoutineError, match="no convergence"):
        library.work()
    for one in profile.ranks:
        names = [entry.name for entry in one.entries if entry.span]
        assert names == ["inner", "assemble", "solve"]


def test_a_span_costs_a_few_microseconds(session: AlchemistSession) -> None:
    def cost(comm: Any) -> float:
        ctx = ali.context()
        batches = []
        for _ in range(20):
            begun = time.perf_counter()
            for _ in range(100):
                with ctx.span("empty"):
                    pass
            batches.append(time.perf_counter() - begun)
        return min(batches) / 100

    assert session.run(cost) < 20e-6


def least(work: Callable[[], Any], turns: int, of: int = 1) -> float:
    """Seconds of the quickest of some turns, divided by the works in each."""
    times = []
    for _ in range(turns):
        begun = time.perf_counter()
        for _ in range(of):
            work()
        times.append((time.perf_counter() - begun) / of)
    return min(times)


def test_keeping_the_history_costs_less_than_2_percent_of_an_empty_call(
    session: AlchemistSession,
) -> None:
    body = {"op": "call", "library": "echo", "routine": "nothing"}

    def on_rank() -> None:  # as `RankLoop._answer`
        begun, counter, waited_s = time.time(), time.perf_counter(), interruption.waited_s()
        seconds, mpi_s = time.perf_counter() - counter, interruption.waited_s() - waited_s
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        history.add(body, begun, seconds, min(mpi_s, seconds), peak_kib, failed=False)

    def in_program() -> None:
        events.note_span(events.COMMAND, "echo.nothing", events.now())

    kept_s = least(on_rank, 100, 100) + least(in_program, 100, 100)
    call_s = least(session.load_library("echo").nothing, 500)
    assert kept_s < 0.02 * call_s, (kept_s, call_s)


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
        its = [e for e in spans(tmp_path / "traced.json") if e["name"] == "late"]
        assert {e["tid"] for e in its if e["pid"] < 0} == {0, 1}  # the others are of threads here
        assert cli.main(["trace", "traced", "--out", "absent/trace.json"]) == 1
        assert "the trace cannot be written" in capsys.readouterr().err
    assert cli.main(["trace", "traced"]) == 1
    assert "there is no gang 'traced'" in capsys.readouterr().err
