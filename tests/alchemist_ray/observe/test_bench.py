"""``alchemist bench hpc``: its measurements, and the comparison of results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from alchemist_ray import AlchemistSession, cli
from alchemist_ray.gang.info import WorkerInfo
from alchemist_ray.observe.bench import hpc
from alchemist_ray.observe.bench.hpc import BenchError, Measure, Result


def worker(rank: int, node: str) -> WorkerInfo:
    return WorkerInfo(rank=rank, node_id=node, hostname=node, address="", pid=rank, status="idle")


def test_the_command_measures_and_is_read_again(cluster: str, tmp_path: Path) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [
            sys.executable, "-m", "alchemist_ray.cli", "bench", "hpc", "--json", "--workers", "2",
            "--seconds", "0.2", "--label", "here",
        ],
        env={**os.environ, "RAY_ADDRESS": cluster},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - start < 90
    path = tmp_path / "here.json"
    path.write_text(done.stdout)
    result = Result.read(path)
    assert (result.label, result.ranks, result.nodes) == ("here", 2, 1)
    named = {m.what: m for m in result.measures}
    assert named["matmul 1000 x 1000, per rank"].unit == "GFLOP/s"
    assert named["allreduce 8 B"].unit == "us"
    assert "ping-pong within a node, 1.0 MB" in named
    assert all(m.value > 0 for m in result.measures)
    assert hpc.table(result).count("\n") == len(result.measures) + 1


def test_one_rank_has_no_messages(cluster: str) -> None:
    with AlchemistSession(1) as session:
        result = hpc.measure(session, "alone", seconds=0.05)
    assert not [m for m in result.measures if "ping-pong" in m.what or "allreduce" in m.what]
    assert len(result.measures) == 4


def test_pairs_lie_on_one_node_and_on_two() -> None:
    spread = [worker(0, "a"), worker(1, "b"), worker(2, "b"), worker(3, "c")]
    assert hpc.pairs(spread) == {"within a node": (1, 2), "between nodes": (0, 1)}
    assert hpc.pairs(spread[:2]) == {"between nodes": (0, 1)}
    assert hpc.pairs(spread[:1]) == {}


NATIVE = Result(
    "native", 4, 2, "MPICH",
    (Measure("matmul", 100.0, "GFLOP/s", True), Measure("latency", 2.0, "us", False)),
)  # fmt: skip
GUEST = replace(
    NATIVE,
    label="guest",
    measures=(Measure("matmul", 80.0, "GFLOP/s", True), Measure("latency", 8.0, "us", False)),
)


def test_over_one_is_better_whatever_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for result in (GUEST, NATIVE):
        files.append(tmp_path / f"{result.label}.json")
        files[-1].write_text(result.to_json())
    assert cli.main(["bench", "hpc", "--compare", *map(str, files), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"of": "guest", "to": "native", "ratios": {"matmul": 0.8, "latency": 0.25}}
    assert cli.main(["bench", "hpc", "--compare", *map(str, files)]) == 0
    text = capsys.readouterr().out
    assert "0.80  (GFLOP/s)" in text
    assert "0.25  (us)" in text
    assert "geometric mean" in text
    assert "0.45\n" in text  # the root of 0.2


def test_what_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    for text in ("", "[]", '{"format": 99}', '{"format": 1, "colour": 3}'):
        path.write_text(text)
        assert cli.main(["bench", "hpc", "--compare", str(path), str(path)]) == 1
        assert "is not a result of `alchemist bench hpc --json`" in capsys.readouterr().err
    with pytest.raises(BenchError, match="no measure in common"):
        hpc.compared(NATIVE, replace(GUEST, measures=(Measure("other", 1.0, "s", True),)))


def test_unlike_runs_are_said_to_be() -> None:
    assert "different sizes: 4 ranks" in hpc.compared(NATIVE, replace(GUEST, ranks=2))
