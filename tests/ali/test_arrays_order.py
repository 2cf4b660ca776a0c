"""Sorting, scans, quantiles and look-ups on real MPI ranks give NumPy's results."""

from __future__ import annotations

import pytest

from tests.support import launches
from tests.support.suite import scaled


@pytest.mark.parametrize("ranks", scaled([3], [1, 2, 3, 4]))
@pytest.mark.parametrize(
    "checks", ["sorting", "scans", "distinct", "selection", "places", "lookups", "rearranged"]
)
def test_large_arrays_as_in_numpy(checks: str, ranks: int) -> None:
    found = launches.results("tests.ali.ranks_arrays_order:everything", ranks)
    launches.check_right(found[checks], 11)
