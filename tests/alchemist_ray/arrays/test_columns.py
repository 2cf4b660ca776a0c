"""Names of columns stay with selections, copies and matrices that are joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from alchemist_ray import AlchemistSession

NAMES = ("u", "v", "w", "x")


@pytest.fixture
def named(session: AlchemistSession) -> Any:
    return session.send_matrix(pd.DataFrame(np.arange(28.0).reshape(7, 4), columns=list(NAMES)))


def test_names_of_columns_stay(session: AlchemistSession, named: Any) -> None:
    A = named
    for found, expected in [
        (A, NAMES), (A[:, 1:3], ("v", "w")), (A[:, ::-1], NAMES[::-1]), (A[2:5], NAMES),
        (A[:, [3, 0]], ("x", "u")), (A[A[:, 0] > 5], NAMES), (A[[1, 0], 1:], NAMES[1:]),
        (A[:, np.array([True, False, True, False])], ("u", "w")), (A[:, A[0] > 1], ("w", "x")),
        (A[np.ix_([1, 2], [0, 3])], ("u", "x")), (np.take(A, [1, 2], axis=1), ("v", "w")),
        (A[np.argsort(A[:, 1])], NAMES), (np.sort(A, axis=0), NAMES), (A.copy(), NAMES),
        (A.astype("float32"), NAMES), (A.astype(bool), NAMES), (A.to_layout("MC_MR"), NAMES),
        (np.concatenate([A, A, A]), NAMES), (np.hstack([A[:, :1], A[:, 2:]]), ("u", "w", "x")),
        (np.flip(A, 1), NAMES[::-1]),
    ]:  # fmt: skip
        assert found.columns == expected
    kept = A[:, 1:3].keep()
    assert session.matrix(kept.name).columns == ("v", "w")


def test_objects_of_pandas_select(named: Any) -> None:
    A, a = named.copy(), named.fetch()
    chosen = pd.Series(a[:, 0]) > 5
    for key in (chosen, pd.Index([0, 2]), (pd.Series([3, 1]), slice(1, 3)), (chosen, 0)):
        assert np.array_equal(A[key], a[key])
        A[key], a[key] = 2 * A[key], 2 * a[key]
    assert np.array_equal(np.where(chosen, A[:, 0], 0), np.where(chosen, a[:, 0], 0))
    assert np.array_equal(A, a)


def test_other_results_have_no_names(session: AlchemistSession, named: Any) -> None:
    A = named
    for found in [
        A[:, 1], A[0], A[0, 0], A + 1, A.T, A @ A.T, A.mean(axis=0), np.sort(A, axis=1),
        np.concatenate([A, A[:, ::-1]]), np.hstack([A, session.xp.ones((7, 1))]), A.reshape(4, 7),
        A[A > 3], A[:, 0, None],
    ]:  # fmt: skip
        assert found.columns == ()


def test_names_are_given_back(named: Any, tmp_path: Any) -> None:
    path = tmp_path / "some.csv"
    named[::2, [2, 0]].save(path)
    read = pd.read_csv(path)
    assert list(read.columns) == ["w", "u"]
    np.testing.assert_array_equal(read.to_numpy(), named.fetch()[::2, [2, 0]])
