"""The training program as it is shipped, for some seconds: what it prints, what it leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'alchemist-on-ray[rllib]'")
pytest.importorskip("ray.rllib", reason="needs RLlib: pip install 'alchemist-on-ray[rllib]'")
pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'alchemist-on-ray[envs]'")

from benchmarks.rayleigh_benard.curves import Curve
from tests.support import commands
from tests.support.build import needs_compiler

MOST_BYTES = 300 << 10
# An episode for each number instead of two or four.
PROGRAM = """
from benchmarks.rayleigh_benard import train
train.SEEDS, train.VALIDATION_SEEDS = train.SEEDS[:1], train.VALIDATION_SEEDS[:1]
raise SystemExit(train.main())
"""


@needs_compiler
def test_it_trains_compares_and_draws(cluster: str, rllib: None, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "--minutes", "0.05", "--gangs", "1"]
    command += ["--out", str(tmp_path / "out"), "--address", cluster]
    done = commands.run(*command, limit_s=220)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[1:3] for line in done.stdout.splitlines() if line.startswith("| ")]
    table = {name.strip(): float(value) for name, value in rows[1:]}
    assert table["no control"] == pytest.approx(4.90, abs=0.05)
    assert table["P-control"] == pytest.approx(4.07, abs=0.1)
    assert 3.5 < table["PPO"] < 5.5  # some seconds teach little
    out = tmp_path / "out"
    found = json.loads((out / "curve.json").read_text())
    assert found["validation"]
    assert found["validation"][-1][1] >= 200  # control steps
    assert (out / "checkpoint").is_dir()
    for name in ("curve.png", "strip.png"):
        assert 0 < (out / name).stat().st_size < MOST_BYTES
    assert (out / "after.gif").read_bytes()[:3] == b"GIF"


def test_a_curve_keeps_the_best_and_draws_itself(tmp_path: Path) -> None:
    curve = Curve(baselines={"no control": 4.9})
    assert curve.best == float("inf")
    curve.draw(curve.save(tmp_path / "empty.json").with_suffix(".png"))
    curve.validation += [(1.0, 100, 4.7), (2.0, 200, 4.2), (3.0, 300, 4.3)]
    curve.training += [(1.0, 100, 4.8)]
    assert curve.best == 4.2
    told = json.loads(curve.save(tmp_path / "curve.json", seed=3).read_text())
    assert told["seed"] == 3
    assert np.array(told["validation"]).shape == (3, 3)
    assert curve.draw(tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
