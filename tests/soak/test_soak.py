"""Random use leaves no memory, descriptor, thread or file behind."""

from __future__ import annotations

import pytest

from tests.soak import actions, measure
from tests.support.suite import scaled

SECONDS = scaled(30, 1200)


@pytest.mark.timeout(SECONDS * 2 + 300, func_only=True)
def test_random_use_leaves_nothing_behind(cluster: str) -> None:
    report = actions.soak(SECONDS, seed=1)
    print(measure.table(report))
    assert measure.excess(report) == [], measure.table(report)
