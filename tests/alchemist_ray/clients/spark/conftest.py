"""One gang of 3 and one Spark for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from tests.support.sparks import Sparks, sparks

__all__ = ["sparks"]

X = np.random.default_rng(5).standard_normal((103, 7))


@pytest.fixture(scope="package")
def gang(cluster: str) -> Iterator[AlchemistSession]:
    """One session for all tests of the folder; they leave it intact."""
    with AlchemistSession(3) as opened:
        yield opened


@pytest.fixture
def spark(sparks: Sparks) -> Any:
    """A local Spark."""
    return sparks.local()


@pytest.fixture
def jvm(spark: Any) -> Any:
    """The module by which executors' JVMs move rows."""
    return pytest.importorskip("alchemist_ray.clients.spark.jvm")
