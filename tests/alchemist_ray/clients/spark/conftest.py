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


class Reports:
    """The reports of all tasks that have sent in a test."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.tasks: list[int] = []  # of each send

    def columns(self) -> int:
        """How many columns of batches were sent from the cache itself, since the last call."""
        found, self.all = self.all, []
        return sum(each.get("direct", 0) for each in found)

    def routes(self) -> set[str]:
        return {its["route"] for each in self.all for its in each.get("times", [])}


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    noted = Reports()
    sources = pytest.importorskip("alchemist_ray.clients.spark.sources")
    check = sources._check

    def note(some: Any) -> None:
        noted.all += some
        noted.tasks.append(len(some))
        check(some)

    monkeypatch.setattr(sources, "_check", note)
    return noted


@pytest.fixture
def spark(sparks: Sparks) -> Any:
    """A local Spark."""
    return sparks.local()


@pytest.fixture
def jvm(spark: Any) -> Any:
    """The module by which executors' JVMs move rows."""
    return pytest.importorskip("alchemist_ray.clients.spark.jvm")
