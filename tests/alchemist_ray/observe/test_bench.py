"""``alchemist bench hpc``: its measurements, and the comparison of results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from alchemist_ray import AlchemistSession, cli
from alchemist_ray.observe import bench
from alchemist_ray.observe.bench import BenchError, Measure, Result
from tests.support import commands, traces


def test_the_command_measures_and_is_read_again(cluster: str, tmp_path: Path) -> None:
    start = traces.clock()
    words = ["bench", "hpc", "--json", "--workers", "2", "--seconds", "0.2", "--label", "here"]
    done = commands.alchemist(*words, code=0, RAY_ADDRESS=cluster)
    assert traces.clock() - start < 90
    path = tmp_path / "here.json"
    path.write_text(done.stdout)
    result = Result.read(path)
    assert (result.label, result.ranks, result.nodes) == ("here", 2, 1)
    named = {m.what: m for m in result.measures}
    assert named["dgemm 1000 x 1000, per rank"].unit == "GFLOP/s"
    for what in ("stream triad, slowest rank", "random ring, 2.0 MB"):
        assert what in named, sorted(named)
    assert named["allreduce 8 B"].unit == "us"
    assert "ping-pong within a node, 1.0 MB" in named
    assert all(m.value > 0 for m in result.measures)
    assert bench.table(result).count("\n") == len(result.measures) + 1


def test_one_rank_has_no_messages(cluster: str) -> None:
    with AlchemistSession(1) as session:
        result = bench.measure(session, "alone", seconds=0.05)
    messages = ("ping-pong", "allreduce", "ring")
    assert not [m for m in result.measures if any(name in m.what for name in messages)]
    assert len(result.measures) == 10


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
    for result in (GUEST, replace(GUEST, label="other"), NATIVE):
        files.append(str(tmp_path / f"{result.label}.json"))
        Path(files[-1]).write_text(result.to_json())
    assert cli.main(["bench", "hpc", "--compare", files[0], files[2], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"of": "guest", "to": "native", "ratios": {"matmul": 0.8, "latency": 0.25}}
    assert cli.main(["bench", "hpc", "--compare", *files]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[1].split() == ["native", "guest", "other"]
    assert text.count("80 (0.80)") == text.count("8 (0.25)") == 2
    assert "80 (0.80)  GFLOP/s" in text
    assert "8 (0.25)  us" in text
    assert "native: 4 ranks on 2 nodes, MPICH; guest: 4 ranks on 2 nodes, MPICH" in text
    assert "(0.45)\nin brackets: ratio to native" in text  # the root of 0.2


def test_what_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    for text in ("", "[]", '{"format": 99}', '{"format": 1, "colour": 3}'):
        path.write_text(text)
        assert cli.main(["bench", "hpc", "--compare", str(path), str(path)]) == 1
        assert "not a result of `alchemist bench hpc --json`" in capsys.readouterr().err
    other = replace(GUEST, measures=(Measure("other", 1.0, "s", True),))
    with pytest.raises(BenchError, match="no measure in common"):
        bench.side_by_side(NATIVE, [other])


def test_unlike_runs_are_said_to_be() -> None:
    text = bench.side_by_side(NATIVE, [replace(GUEST, ranks=2)])
    assert text.startswith("different sizes: native: 4 ranks")
