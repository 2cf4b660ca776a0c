"""Singular vectors of bidiagonal matrices by divide and conquer, which ScaLAPACK's svd uses."""

from __future__ import annotations

import pytest

from mpi_workers.testing import local_gang


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_and_vectors_are_those_of_numpy(ranks: int) -> None:
    done, wrong = local_gang.run("tests.ali.ranks_bidiagonal:bidiagonals", ranks)
    assert wrong == []
    assert done >= 200
