"""The tree of errors is whole, documented, and survives its journeys."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from alchemist_ray import errors
from mpi_workers.failures import Failure

ROOT = Path(__file__).parents[2]
CLASSES = sorted(
    (c for c in vars(errors).values() if isinstance(c, type) and c.__module__ == errors.__name__),
    key=lambda c: c.__name__,
)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_the_drawn_tree_has_every_class_under_its_parent(kind: type) -> None:
    assert issubclass(kind, errors.AlchemistError)
    assert re.search(rf"\b{kind.__name__}\b", errors.__doc__ or "")
    assert kind.__doc__


def test_every_kind_raised_on_the_mpi_side_is_a_class_of_the_tree() -> None:
    known = {c.__name__ for c in CLASSES}
    raised = set()
    for folder in ("mpi_workers", "ali", "alchemist_ray"):
        for path in (ROOT / folder).rglob("*.py"):
            raised |= set(re.findall(r'Failure\(\s*"(\w+)"', path.read_text()))
    assert len(raised) > 10
    assert raised <= known


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_an_error_survives_pickle_and_the_wire_unchanged(kind: type[errors.AlchemistError]) -> None:
    error = kind("what happened", rank=3, traceback="Traceback ...")
    for twin in (
        pickle.loads(pickle.dumps(error)),
        errors.from_failure(Failure.from_map(errors.to_failure(error).to_map())),
    ):
        assert type(twin) is kind
        assert twin.args == ("what happened",)
        assert (twin.rank, twin.traceback) == (3, "Traceback ...")


def test_a_routine_error_shows_the_ranks_own_traceback() -> None:
    error = errors.RoutineError("f failed on rank 2", rank=2, traceback="Traceback: boom")
    assert "Traceback: boom" in str(error)
    assert "rank 2" in str(error)


def test_an_unknown_kind_is_still_an_error_of_the_tree() -> None:
    assert type(errors.from_failure(Failure("NoSuchKind", "x"))) is errors.AlchemistError


def test_errors_derive_from_pythons_own_types() -> None:
    assert issubclass(errors.BadArgumentError, TypeError)
    assert issubclass(errors.ShapeError, ValueError)
    assert issubclass(errors.NoSuchRoutineError, AttributeError)
