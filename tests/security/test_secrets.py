"""Secrets do not appear in logs."""

from __future__ import annotations

import pytest

from alchemist_ray.attached.address import GangAddress
from mpi_workers.data.description import DataEndpoints
from mpi_workers.node.specs import GangPlan, RankConfig, RankOptions

SECRET = "a-secret-of-the-gang"


@pytest.mark.parametrize(
    "holder",
    [
        DataEndpoints(SECRET, ()),
        GangAddress("g", "s", 1, SECRET, (), (), (), "g.1"),
        GangPlan("g", (), SECRET, (), 0),
        RankConfig(SECRET, "/d", "unix:x", "unix:y", 1, None, False, 0, RankOptions()),
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_the_repr_of_a_holder_of_the_token_hides_it(holder: object) -> None:
    assert type(holder).__name__ in repr(holder)
    assert SECRET not in f"{holder!r} {holder}"
