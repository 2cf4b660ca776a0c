"""Correct MPI programs give through the layer what they give without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpi_workers.local import local_gang
from tests.mpi_workers.waits import ranks_careless, ranks_kept, ranks_pending
from tests.mpi_workers.waits.programs import differences, outcomes, wrong
from tests.mpi_workers.waits.ranks_careless import COUNTS
from tests.support.suite import LONG

PAIRS = list(ranks_pending.PROGRAMS)  # 1,600
MEMORY = "tests.mpi_workers.waits.ranks_memory:reused"
STRIDE = 17  # without a common factor with the numbers of operations and of waits


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("pending", ranks_pending.PENDING if LONG else ["each"])
def test_a_rank_that_waits_makes_progress_on_what_is_pending(pending: str, ranks: int) -> None:
    names = [name for name in PAIRS if name.startswith(f"{pending}; ")] or PAIRS[ranks::STRIDE]
    found = outcomes("ranks_pending", names, ranks)
    plain = outcomes("ranks_pending", names, ranks, layer=False)
    assert differences(found, plain) == {}


def test_what_a_call_left_on_a_communicator_that_is_kept_reaches_no_later_one() -> None:
    found = outcomes("ranks_kept", list(ranks_kept.PROGRAMS), 3, most_ended=99)
    assert wrong(found, []) == {}


@pytest.mark.parametrize("ranks", [2, 3])
def test_wrong_counts_and_errors_do_what_they_do_in_plain_mpi(ranks: int) -> None:
    """With 2 ranks: some wrong counts make more ranks wait for ever, also in plain MPI."""
    names = [name for name in ranks_careless.PROGRAMS if ranks == 2 or name not in COUNTS]
    found = outcomes("ranks_careless", names, ranks, most_ended=99)
    plain = outcomes("ranks_careless", names, ranks, layer=False)
    wrong = differences(found, plain)
    for name, (outcome, expected) in differences(found, plain).items():
        if isinstance(outcome, list) and isinstance(expected, list):
            pairs = zip(outcome, expected, strict=True)
            if all(its == other or _only_unreported(its, other) for its, other in pairs):
                del wrong[name]
    assert wrong == {}


def _only_unreported(outcome: Any, expected: Any) -> bool:
    """Whether an error of blocking calls is missing, and nothing else is wrong."""
    (_, value), (_, plain) = outcome[1], expected[1]
    return bool(plain == "truncated" and isinstance(value, dict) and not value["beyond"])


def test_nothing_is_written_into_memory_that_a_call_has_left(tmp_path: Path) -> None:
    found = local_gang.run(MEMORY, 4, str(tmp_path / "word"), timeout=120)
    assert len(found) == 27
    assert {name: count for name, count in found.items() if count} == {}
