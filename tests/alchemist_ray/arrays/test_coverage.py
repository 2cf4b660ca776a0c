"""The page of coverage is that of the present tests, and every function of handles is in it."""

from __future__ import annotations

import numpy as np

from alchemist_ray.arrays import function_dispatch
from alchemist_ray.arrays.rules import FUNCTIONS
from mpi_workers.protocol.libraries import BINARY, PARTS, UNARY
from tests.alchemist_ray.arrays import coverage


def test_every_function_is_compared_with_numpy() -> None:
    compared = coverage.recorded()
    assert function_dispatch.IMPLEMENTED_IN  # these modules fill the table
    assert not [f for f in compared if not isinstance(f, np.ufunc) and f not in FUNCTIONS]
    assert {f.__name__ for f in FUNCTIONS if f not in compared} == {"can_cast"}  # takes dtypes
    assert not {name for name in UNARY | PARTS | BINARY if getattr(np, name) not in compared}


def test_the_page_is_current() -> None:
    assert coverage.PAGE.read_text() == coverage.page(), (
        "run: python -m tests.alchemist_ray.arrays.coverage"
    )
