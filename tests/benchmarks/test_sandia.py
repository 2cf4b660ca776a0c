"""The Sandia report's experiments: measures in each place, and the validation of TeraSort."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from alchemist_ray.observe.bench import Measure
from benchmarks.papers import guests, sandia, terasort
from benchmarks.papers.experiment import Page, Setting

TINY = Setting("small", runs=1, divide=1e4, spark=False)


def test_places_are_in_columns(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    page = sandia.run(TINY)
    page.save(TINY, tmp_path)
    text = (tmp_path / "sandia.md").read_text()
    assert "| hpl, n = 1500 | GFLOP/s |" in text
    assert "| weak scaling: ranks | HPL, GFLOP/s: native |" in text
    assert len(page.data["weak, 2 ranks"]["gang"]) == TINY.runs
    assert "geometric mean of the ratios to native" in text
    assert "not measured: left out (`--no-spark`)" in text
    assert page.data["native"].keys() == page.data["gang"].keys()
    assert (tmp_path / "sandia.png").stat().st_size > 10_000


def test_ratios_are_of_the_best_runs_and_over_one_is_better() -> None:
    def measures(rates: list[float], times: list[float]) -> dict[str, list[Measure]]:
        return {
            "rate": [Measure("rate", value, "GB/s", more=True) for value in rates],
            "time": [Measure("time", value, "us", more=False) for value in times],
        }

    values = {"native": measures([1, 4], [2, 1]), "gang": measures([2, 1], [4, 9])}
    assert sandia.ratios(values, "gang") == {"rate": 0.5, "time": 0.25}


def test_guests_are_beside_native_in_every_row_and_missing_ones_are_dashes(tmp_path: Path) -> None:
    page = Page("guests", "native against guests", "small")
    native = [
        Measure("hpl", 10.0, "GFLOP/s", more=True),
        Measure("TeraSort", 2.0, "s", more=False),
        Measure("spark-perf, count", 1.0, "s", more=False),
    ]
    guest = [Measure("TeraSort", 8.0, "s", more=False), Measure("hpl", 10.0, "GFLOP/s", more=True)]
    page.data = {
        "native": [asdict(one) for one in native], "guest": [asdict(one) for one in guest],
        "changes, s": {"`als.resize(3)`": 1.5}, "emulated": False,
    }  # fmt: skip
    guests.fill(page)
    page.save(TINY, tmp_path)
    text = (tmp_path / "guests.md").read_text()
    for row in (
        "| hpl | GFLOP/s | 10 | 10 | 1 |",
        "| TeraSort | s | 2 | 8 | 0.25 |",
        "| spark-perf, count | s | 1 | - | - |",
        "| geometric mean |  | 1 |  | 0.5 |",
        "| `als.resize(3)` | 1.5 |",
    ):
        assert row in text


def write(folder: Path, *files: list[bytes]) -> Path:
    folder.mkdir()
    for number, keys in enumerate(files):
        table = pa.table({"key": pa.array(keys, pa.binary()), "value": [b"x" * 90] * len(keys)})
        parquet.write_table(table, folder / f"part-{number:05}-x.parquet")
    return folder


def test_order_is_checked_within_and_between_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terasort, "ROWS", 10)  # several batches of each file
    rng = np.random.default_rng(0)
    keys = sorted(rng.bytes(terasort.KEY) for _ in range(100))
    keys[50] = keys[49]  # equal keys are in order
    assert terasort.is_sorted(write(tmp_path / "sorted", keys[:60], [], keys[60:]))
    assert not terasort.is_sorted(write(tmp_path / "files", keys[60:], keys[:60]))
    within = [*keys[:9], keys[10], keys[9], *keys[11:]]  # across the end of a batch
    assert not terasort.is_sorted(write(tmp_path / "within", within))
    last = keys[0][:-1] + bytes([keys[0][-1] ^ 1])  # differs in the last byte only
    ordered = sorted([last, keys[0]])
    assert terasort.is_sorted(write(tmp_path / "low", ordered))
    assert not terasort.is_sorted(write(tmp_path / "high", ordered[::-1]))
