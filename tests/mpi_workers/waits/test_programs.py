"""Correct MPI programs give through the layer what they give without it."""

from __future__ import annotations

import pytest

from tests.mpi_workers.waits import ranks_careless, ranks_kept, ranks_pending
from tests.mpi_workers.waits.programs import differences, outcomes, wrong
from tests.support.suite import LONG

PAIRS = list(ranks_pending.PROGRAMS)  # 1,600
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
    names = list(ranks_careless.PROGRAMS)
    found = outcomes("ranks_careless", names, ranks, most_ended=99)
    plain = outcomes("ranks_careless", names, ranks, layer=False, most_ended=99)
    assert differences(found, plain) == {}
