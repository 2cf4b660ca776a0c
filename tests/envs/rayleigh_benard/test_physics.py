"""The simulator computes Rayleigh-Benard convection, the same on any number of ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rayleigh_benard import spectral, validate
from mpi_workers.local import local_gang
from tests.envs.rayleigh_benard.ranks_cell import SMALL
from tests.support import launches
from tests.support.build import needs_compiler

pytestmark = needs_compiler
RANKS = "tests.envs.rayleigh_benard.ranks_cell"
SHORT = {"height": 15, "width": 36, "spin_up": 1.0, "time_step": 0.2}


@pytest.mark.parametrize(("rayleigh", "printed"), [(5e3, 2.116), (1e4, 2.661)])
def test_heat_transport_is_that_of_the_literature(rayleigh: float, printed: float) -> None:
    """Clever & Busse, J. Fluid Mech. 65, 625 (1974), Pr = 0.71, the critical wavelength."""
    found = launches.run(f"{RANKS}:rolls", 1, rayleigh, 60.0)
    assert found["nusselt"] == pytest.approx(printed, rel=5e-3)
    assert found["nusselt"] == pytest.approx(validate.NUSSELT[rayleigh][1], rel=2e-3)
    # In the steady state as much enters as leaves as is carried.
    assert found["nusselt_top"] == pytest.approx(found["nusselt"], rel=1e-3)
    assert found["nusselt_bottom"] == pytest.approx(found["nusselt_top"], rel=1e-3)


def test_the_spectral_numbers_come_from_the_spectral_method() -> None:
    quick = spectral.nusselt(5e3, order=16, points=18, time=50.0, step=0.05)
    assert quick == pytest.approx(validate.NUSSELT[5e3][1], rel=1e-3)


def test_convection_sets_in_at_the_critical_rayleigh_number() -> None:
    below, above = launches.run(f"{RANKS}:growth", 1, [1680.0, 1740.0])  # 1707.8
    assert below < 0 < above
    critical = 1680 + 60 * below / (below - above)  # rates are nearly linear in Ra
    assert critical == pytest.approx(1707.8, rel=5e-3)


def test_mass_and_heat_are_conserved() -> None:
    found = launches.run(f"{RANKS}:conserved", 2)
    nodes = 16 * 48
    for now in found:
        assert now["mass"] == pytest.approx(found[0]["mass"], rel=1e-13)
        entered = now["heat_entered"] - found[0]["heat_entered"]
        left = now["heat_left"] - found[0]["heat_left"]
        assert now["heat"] - found[0]["heat"] == pytest.approx(entered - left, abs=1e-12 * nodes)
    assert abs(found[-1]["heat"] - found[0]["heat"]) > 1e-6  # there was something to balance


def test_every_bit_is_the_same_on_any_number_of_ranks() -> None:
    shown = [launches.run(f"{RANKS}:episode", ranks, SHORT, 5, 3) for ranks in (1, 2, 3)]
    assert len(set(shown)) == 1


def test_more_ranks_than_are_of_use_do_no_harm() -> None:
    tiny = {**SMALL, "height": 4, "width": 4, "heaters": 4, "probe_rows": 1, "time_step": 0.1}
    tiny["disturbance"] = 0.0
    shown = [launches.run(f"{RANKS}:first_bits", ranks, tiny) for ranks in (1, 4)]
    assert shown[0] == shown[1]


def test_the_same_seed_gives_the_same_first_observation() -> None:
    first, other, again, next_one = launches.run(f"{RANKS}:first_observations", 1, [7, 8, 7])
    assert first == again
    distinct = [first, other, next_one]
    assert all(a != b for a, b in itertools.combinations(distinct, 2))


def test_agents_see_the_cell_from_their_heater_on() -> None:
    found = launches.run(f"{RANKS}:views", 1)
    (whole, score, spec), (seen, rewards, many) = found["1"], found["12"]
    assert json.loads(spec)["observation"]["shape"] == [144]
    assert json.loads(many)["observation"]["shape"] == [12, 144]
    assert json.loads(many)["action"]["shape"] == [12, 1]
    cell = np.array(whole).reshape(12, 12)
    for agent, view in enumerate(np.array(seen).reshape(12, 12, 12)):
        np.testing.assert_array_equal(view, np.roll(cell, -agent, axis=0))
    info = dict(zip(json.loads(spec)["info"], score[1:], strict=True))
    assert score[0] == pytest.approx(2.0 - info["nusselt"])
    assert rewards[12:] == score[1:]
    above = np.array([info[f"nusselt_above_{j}"] for j in range(12)])
    assert above.mean() == pytest.approx(info["nusselt"])
    own = (np.roll(above, 1) + above + np.roll(above, -1)) / 3
    np.testing.assert_allclose(rewards[:12], 0.8 * score[0] + 0.2 * (2.0 - own) / 4)


def test_heaters_keep_the_mean_and_the_amplitude() -> None:
    launches.run(f"{RANKS}:heated", 1)


@pytest.mark.parametrize(("ranks", "layout"), [(1, "VC_STAR"), (3, "MC_MR")])
def test_a_saved_state_goes_on_in_the_same_bits(ranks: int, layout: str, tmp_path: Path) -> None:
    file = str(tmp_path / "state.npy")
    wanted = launches.run(f"{RANKS}:saved", 2, SHORT, file)
    assert launches.run(f"{RANKS}:loaded", ranks, SHORT, file, layout) == wanted


def test_what_cannot_be_is_refused_by_name() -> None:
    cases = {
        "setup": [
            ({"height": 3}, "height must be 4 to 65536, not 3"),
            ({"rayleigh": -1.0}, "rayleigh must be above 0"),
            ({"velocity": 0.5}, "velocity must be in (0, 0.3]"),
            ({"heaters": 0}, "heaters must be 1 to width"),
            ({"agents": 5}, "agents must be 1, or equal to heaters"),
            ({"time_step": 0.0}, "time_step must be above 0"),
            ({"colour": 1}, "setup has no parameter 'colour'"),
        ],
        "step": [
            ({"action": [0.0] * 11}, "12 numbers, one per heater, not 11"),
            ({"action": [0.0] * 11 + [float("nan")]}, "action[11] is nan"),
        ],
        "run": [({"steps": -1}, "-1 steps")],
        "load_state": [({"shape": [5, 5]}, "as save_state() returns it; this one is 5 x 5")],
    }
    flat = [(routine, given) for routine, some in cases.items() for given, _ in some]
    told = launches.run(f"{RANKS}:refusals", 2, flat)
    words = [words for some in cases.values() for _, words in some]
    for wanted, said in zip(words, told[: len(words)], strict=True):
        assert said.startswith("BadArgumentError")
        assert wanted in said
    for said in told[len(words) :]:
        assert "call setup() first" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_call_that_is_ended_leaves_a_simulator_that_resets(ranks: int) -> None:
    found = local_gang.run(f"{RANKS}:cancelled", ranks)
    assert found["cancelled"]
    assert found["the same"]
    for routine in ("get_state", "run", "render", "save_state"):
        assert "reset() first" in found[routine]


@pytest.mark.parametrize(
    ("sim", "warned"),
    [({"spin_up": 5.0}, True), ({"spin_up": 5.0, "reference": 4.9}, False), ({}, False)],
)
def test_a_reference_from_a_flow_that_has_not_developed_is_warned_of(
    sim: dict[str, float], warned: bool
) -> None:
    warning = launches.run(f"{RANKS}:spec", 1, sim).get("warning", "")
    assert ("after spin_up=5 its Nusselt number is 9.996, and 5.159 through" in warning) == warned
