"""The study of control methods: short runs of each method, resumed, and their report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "stable_baselines3", reason="needs stable-baselines3: pip install 'alchemist-on-ray[sb3]'"
)

from benchmarks.rayleigh_benard import gains
from benchmarks.rayleigh_benard.baselines import P_CONTROL, ProportionalControl
from benchmarks.rayleigh_benard.study import GAINS, METHODS, Case, best_policy, main
from tests.support import commands
from tests.support.build import needs_compiler

PROGRAM = """
from benchmarks.rayleigh_benard import study
study.VALIDATION_SEEDS = study.VALIDATION_SEEDS[:1]
raise SystemExit(study.main())
"""


def study(cluster: str, folder: Path, *options: str) -> str:
    command = [sys.executable, "-c", PROGRAM, "--address", cluster]
    command += ["--seeds", "1", "--episodes", "1", "--out", str(folder), *options]
    command += ["--results", str(folder / "results")]
    done = commands.run(*command, limit_s=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_compiler
@pytest.mark.timeout(400)
def test_every_method_trains_is_tested_and_goes_on_where_it_stopped(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study(cluster, tmp_path, "--steps", "400")
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("results/*.json")}
    assert set(results) == {f"ra8.0e4-{name}-0" for name in (*METHODS, "none", "p")}
    assert results["ra8.0e4-none-0"]["nusselt"] == [pytest.approx(4.90, abs=0.05)]
    assert results["ra8.0e4-p-0"]["nusselt"] == [pytest.approx(4.07, abs=0.1)]
    for method in METHODS:
        assert results[f"ra8.0e4-{method}-0"]["steps"] == 400
    said = study(cluster, tmp_path, "--steps", "800", "--methods", "sac")
    assert said.count("ra8.0e4-sac-0: 800 steps") == 1
    assert "none" not in said  # it is finished
    longer = json.loads((tmp_path / "results/ra8.0e4-sac-0.json").read_text())
    first = results["ra8.0e4-sac-0"]["validation"]
    assert longer["validation"][:1] == first
    assert longer["validation"][1][0] == 800
    assert study(cluster, tmp_path, "--steps", "800", "--methods", "sac") == ""
    assert main(["--report", "--results", str(tmp_path / "results")]) == 0
    assert "| 8.0e+04 | SAC, one policy for the cell | 1 | 800 | " in capsys.readouterr().out
    assert (tmp_path / "results" / "study.png").stat().st_size > 5000


@needs_compiler
def test_gains_are_searched_and_used_at_their_rayleigh_number(cluster: str, tmp_path: Path) -> None:
    (best, found), (worse, other) = gains.search(8e4, (12.0,), (-8.0, 24.0), (21, 22))
    assert found == P_CONTROL
    assert best == pytest.approx(4.07, abs=0.05)
    assert other == ProportionalControl(12.0, 24.0)
    assert worse > best
    for rayleigh, pair in GAINS.items():
        assert best_policy(Case(rayleigh, "p", 0), tmp_path) == ProportionalControl(*pair)
    assert best_policy(Case(8e4, "p", 0), tmp_path) == P_CONTROL
