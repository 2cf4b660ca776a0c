"""Simulators on ranks: one on all of them, copies dealt to them, what is refused, what fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpi_workers.local import local_gang
from tests.support import launches
from tests.support.build import needs_compiler, shared_object

RANKS = "tests.ali.ranks_simulator:"
SOURCE = Path(__file__).parent / "native" / "spring.c"

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def spring(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(shared_object(SOURCE, tmp_path_factory.mktemp("spring") / "libspring.so"))


def stepped(seed: int, steps: list[tuple[float, float]], ranks: int) -> list[float]:
    """The spring, as the C source has it."""
    x = [float(i + seed % 7) for i in range(4)]
    for force in steps:
        x = [value + force[i % 2] / ranks for i, value in enumerate(x)]
    return x


def record(x: list[float], ranks: int, stepped: bool = True) -> list[float]:
    return [*x, *((x[0], float(ranks), float(x[0] > 5.0)) if stepped else (0.0, 0.0, 0.0))]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_simulation_on_all_ranks(spring: str, ranks: int) -> None:
    told = launches.run(RANKS + "one", ranks, spring)
    assert told["before"].startswith("LibraryNotFoundError: ")
    assert "attach" in told["before"]
    spec: dict[str, Any] = told["spec"]
    assert spec["observation"] == {"shape": [2, 2], "low": -9, "high": 9, "dtype": "float32"}
    assert [spec[k] for k in ("agents", "episode_length", "time_step")] == [1, None, 1.0]
    force = (0.5, 1.0)
    for turn, rows in enumerate(told["records"]):
        expected = record(stepped(2, [force] * turn, ranks), ranks, stepped=turn > 0)
        assert rows == [pytest.approx(expected)]
    words = [
        "NaN", "3 numbers", "copies 0 to 0", "give a seed", "no copy 1", "save_state", "copies=0",
    ]  # fmt: skip
    for said, word in zip(told["bad"], words, strict=True):
        kind = "NoSuchRoutineError" if word == "save_state" else "BadArgumentError"
        assert said.startswith(f"{kind}: ")
        assert word in said
    assert told["same everywhere"]
    x = stepped(2, [force] * 2, ranks)
    assert told["field"] == [pytest.approx(x), pytest.approx([value + 10 for value in x])]
    assert told["again"] == [True, told["records"][0]]


@pytest.mark.parametrize(("ranks", "copies"), [(1, 3), (2, 5), (3, 3), (3, 2), (4, 2)])
def test_copies_are_dealt_to_the_ranks(spring: str, ranks: int, copies: int) -> None:
    told = launches.run(RANKS + "many", ranks, spring, copies)
    first, second, third = told["records"]
    for copy in range(copies):
        owners = [rank for rank in range(ranks) if rank * copies // ranks == copy]
        size = len(owners) if copies < ranks else 1
        force = (2.0 * copy, 2.0 * copy + 1)
        assert first[copy] == record(stepped(copy, [], 1), size, stepped=False)
        assert second[copy] == pytest.approx(record(stepped(copy, [force], size), size))
        if copy == 1:  # starts again, with another seed
            x = stepped(5, [], 1)
            assert third[copy] == record(x, size, stepped=False)
        else:
            x = stepped(copy, [force] * 2, size)
            assert third[copy] == pytest.approx(record(x, size))
        assert told["fields"][copy] == pytest.approx(x)


@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (3, 2), (2, 4)])
def test_a_step_that_fails_on_one_rank_is_left_by_all(spring: str, ranks: int, copies: int) -> None:
    told = local_gang.run(RANKS + "failing", ranks, spring, copies)
    assert any("the spring broke in step 2" in said for said in told["said"])
    begun, after = told["after"]
    assert len(begun) == copies
    assert [row[0] for row in after] == [
        pytest.approx(1.0 / row[5]) for row in after
    ]  # one force, shared by the ranks of each copy


def test_a_part_of_a_gang_is_a_gang() -> None:
    whole = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert launches.run(RANKS + "context", 3) == [[0, 2, whole], [0, 1, whole], [1, 2, whole]]


def test_every_copy_is_closed_also_after_an_error(tmp_path: Path) -> None:
    wrong, several = launches.run(RANKS + "closings", 1, str(tmp_path))
    assert "its spec has action shape 'wrong'" in wrong[0]
    assert wrong[1:] == ["closed"]
    assert several == ["cannot be closed", *["closed"] * 3]


def test_copies_on_different_ranks_have_the_same_spec(tmp_path: Path) -> None:
    said = launches.run(RANKS + "different", 3, str(tmp_path))
    assert said.startswith("LibraryLoadError: ")
    assert "its copies' specs differ" in said
    assert (tmp_path / "log").read_text().split() == ["closed"] * 3


def test_the_state_of_a_copy_may_be_a_number(tmp_path: Path) -> None:
    assert launches.run(RANKS + "number", 1, str(tmp_path)) == [[], "<f8"]
