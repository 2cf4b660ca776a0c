"""Random programs that are correct MPI give through the layer what they give under plain MPI."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mpi_workers.waits.programs import Outcome, outcomes
from tests.mpi_workers.waits.ranks_programs import RENEWED
from tests.support.suite import scaled

PROGRAMS = scaled(40, 2000)  # of all sizes together
BATCH = 100  # programs of a gang: MPI has 2048 communicators
SIZES = (2, 3, 4)


def _batches() -> list[tuple[int, int, int]]:
    """Ranks, the first program, the one after the last."""
    each = PROGRAMS // len(SIZES) + 1
    return [
        (ranks, first, min(first + BATCH, each))
        for ranks in SIZES
        for first in range(0, each, BATCH)
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("ranks", "first", "end"), _batches())
def test_they_give_the_same(ranks: int, first: int, end: int) -> None:
    names = [str(1_000_000 * ranks + number) for number in range(first, end)]
    found = outcomes("ranks_random", names, ranks, False)
    plain = outcomes("ranks_random", names, ranks, True, layer=False)
    assert {
        name: (found[name], plain[name]) for name in found if not _same(found[name], plain[name])
    } == {}


def _same(found: Outcome, plain: Outcome) -> bool:
    """Whether all calls gave the same, up to one after which the ranks would be new processes."""
    if isinstance(found, str) or isinstance(plain, str):
        return False
    pairs = zip(map(_calls, found), map(_calls, plain), strict=True)
    return all(its == other[: len(its)] for its, other in pairs)


def _calls(outcome: list[Any]) -> list[Any]:
    if outcome[0] != "value":
        return [outcome]
    return [call for call in outcome[1] if call[0] != RENEWED]
