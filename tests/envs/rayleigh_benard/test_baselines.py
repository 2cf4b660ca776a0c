"""The baselines that a policy has to beat."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.rayleigh_benard.baselines import (
    HEATERS,
    NO_CONTROL,
    P_CONTROL,
    PROBE_ROWS,
    ProportionalControl,
)
from tests.support import launches
from tests.support.build import needs_compiler

RANKS = "tests.envs.rayleigh_benard.ranks_cell"
cells = arrays(np.float32, (HEATERS, 3 * PROBE_ROWS), elements=st.floats(-3, 3, width=32))


@given(cells)
def test_agents_decide_as_one_controller_does(cell: np.ndarray) -> None:
    seen = np.stack([np.roll(cell, -j, axis=0).ravel() for j in range(HEATERS)])
    for policy in (P_CONTROL, NO_CONTROL):
        whole, each = policy(cell.ravel()), policy(seen)
        assert whole.shape == (HEATERS,)
        assert each.shape == (HEATERS, 1)
        assert np.abs(whole).max() <= 1
        np.testing.assert_allclose(each[:, 0], whole, atol=1e-5)


def test_proportional_control_cools_where_fluid_rises() -> None:
    cell = np.zeros((HEATERS, 3, PROBE_ROWS), np.float32)
    cell[4, 2] = 0.1  # upwards above heater 4
    action = ProportionalControl(velocity_gain=1.0, temperature_gain=0.0)(cell.ravel())
    assert action[4] < 0
    assert (np.delete(action, 4) > 0).all()
    assert action.sum() == pytest.approx(0, abs=1e-6)


@needs_compiler
def test_control_beats_no_control() -> None:
    """On the default cell; whole episodes are reported by the module itself."""
    found = launches.run(f"{RANKS}:controlled", 1, 60, timeout=90.0)
    assert found["none"] == pytest.approx(4.90, rel=5e-3)
    assert found["developed"] == pytest.approx(4.8996, rel=1e-4)
    assert found["p"] < 4.35  # 60 actions from the start; 4.07 over an episode
