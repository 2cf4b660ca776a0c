"""A matrix that goes from gang to gang equals NumPy's; a copy that breaks leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    AlchemistError,
    DtypeError,
    MatrixError,
    MatrixNotFoundError,
    TransferError,
)
from alchemist_ray.transfer import gang_copies
from mpi_workers.data import description
from mpi_workers.matrix.dtypes import DTYPES
from tests.support.layouts import SOME_LAYOUTS

Pair = tuple[AlchemistSession, AlchemistSession]


@pytest.fixture(scope="module")
def pair(cluster: str) -> Iterator[Pair]:
    """Gangs of 3 and of 2 ranks."""
    with AlchemistSession(3) as a, AlchemistSession(2) as b:
        yield a, b


@pytest.fixture(scope="module")
def gangs(pair: Pair) -> Iterator[tuple[AlchemistSession, ...]]:
    """Gangs of 3, of 2 and of 1 rank."""
    with AlchemistSession(1) as c:
        yield *pair, c


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_equals_numpy(gangs: tuple[AlchemistSession, ...], data: st.DataObject) -> None:
    first, second, _ = data.draw(st.permutations(gangs), "gangs")
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=8), "shape"))
    dtype = data.draw(st.sampled_from([*DTYPES, "datetime64[s]", "timedelta64[ms]"]), "dtype")
    layouts = [data.draw(st.sampled_from(SOME_LAYOUTS)) for _ in range(2)]
    x = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    B = second.send_matrix(first.send_matrix(x, layout=layouts[0]), layout=layouts[1])
    assert (B.shape, B.dtype, B.layout) == (x.shape, x.dtype, layouts[1])
    np.testing.assert_array_equal(B.fetch(), x)


def test_sparse_columns_missing_values_and_conversions(pair: Pair) -> None:
    a, b = pair
    sparse, pandas = pytest.importorskip("scipy.sparse"), pytest.importorskip("pandas")
    S = sparse.random(300, 200, 0.05, format="csr", random_state=1)
    sent = b.send_matrix(a.send_matrix(S))
    assert (sent.fetch() != S).nnz == 0
    np.testing.assert_allclose((sent @ np.ones(200)).fetch(), S @ np.ones(200))
    with pytest.raises(DtypeError, match="astype"):
        b.send_matrix(a.send_matrix(S), dtype="float32")
    frame = pandas.DataFrame({"u": [1.0, np.nan], "k": pandas.Categorical(["x", None])})
    table = b.send_matrix(a.send_matrix(frame, missing="nan"))
    assert (table.columns, table.categories) == (("u", "k"), {"k": ("x",)})
    np.testing.assert_array_equal(table.fetch(), [[1, 0], [np.nan, np.nan]])
    days = np.array(["2020-01-01", "NaT"], "M8[D]")
    times = b.send_matrix(a.send_matrix(days), dtype="M8[s]")
    np.testing.assert_array_equal(times.fetch(), days.astype("M8[s]"))
    recorded = a.send_matrix(np.arange(5.0)) * 2 + 1
    np.testing.assert_array_equal(b.send_matrix(recorded).fetch(), np.arange(5) * 2.0 + 1)


def test_what_cannot_be_sent_is_refused_and_leaves_nothing(pair: Pair) -> None:
    a, b = pair
    A = a.send_matrix(np.array([300]), name="A")
    before = len(b.list_matrices())
    with pytest.raises(DtypeError, match="A has the element 300, which int8 cannot hold"):
        b.send_matrix(A, dtype="int8")
    with pytest.raises(MatrixError, match="on the ranks already"):
        a.send_matrix(A)
    with pytest.raises(MatrixError, match="send_matrix copies that of another gang"):
        b.send_blocks(A, shape=(1,))
    with pytest.raises(MatrixNotFoundError, match=r"session\.send_matrix\(A\)"):
        b.run(lambda comm, matrix: 0, A)
    assert len(b.list_matrices()) == before
    A.free()


def after_the_first_job(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Run an action once, when a part has been copied and others have not."""
    left, add_times = [action], description.add_times

    def add(*arguments: Any) -> None:
        add_times(*arguments)
        if left:
            left.pop()()

    monkeypatch.setattr(gang_copies, "add_times", add)
    monkeypatch.setattr(gang_copies, "JOB_BYTES", 1 << 16)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", ["freed", "Ctrl-C", "changed", "changed again"])
def test_a_copy_that_breaks_leaves_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    a, b = pair
    x = np.random.default_rng(2).random((500, 400))
    A = a.send_matrix(x, name="A")
    before = len(b.list_matrices())

    def change() -> None:
        a.run(lambda comm, matrix: matrix.local.__iadd__(1) is None, A)

    action = {"freed": A.free, "Ctrl-C": interrupt}.get(what, change)
    after_the_first_job(monkeypatch, action)
    if what == "changed":  # it is sent once more, and is of one moment
        B = b.send_matrix(A)
        np.testing.assert_array_equal(B.fetch(), x + 1)
        B.free()
    elif what == "changed again":

        def add(*given: Any) -> None:
            description.add_times(*given)
            change()

        monkeypatch.setattr(gang_copies, "add_times", add)
        with pytest.raises(TransferError, match=r"A was changed while it was sent.*A\.copy"):
            b.send_matrix(A)
    else:
        error = {"freed": MatrixNotFoundError, "Ctrl-C": KeyboardInterrupt}[what]
        with pytest.raises(error, match="was freed while it was sent" if what == "freed" else None):
            b.send_matrix(A)
    assert len(b.list_matrices()) == before
    assert b.run(lambda comm: comm.allreduce(1)) == 2
    if what != "freed":
        A.free()


@pytest.mark.parametrize("lost", ["source", "target"])
def test_a_gang_that_ends_is_named_and_the_other_one_goes_on(
    cluster: str, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    x = np.random.default_rng(3).random((500, 400))
    with AlchemistSession(1) as a, AlchemistSession(1) as b:
        A = a.send_matrix(x)
        after_the_first_job(monkeypatch, a.stop if lost == "source" else b.stop)
        with pytest.raises(AlchemistError) as caught:
            b.send_matrix(A)
        if lost == "source":
            assert isinstance(caught.value, TransferError)
            assert caught.match(f"gang {A.gang}, which has it, was lost or has ended")
            assert not b.list_matrices()
            assert b.run(lambda comm: comm.allreduce(1)) == 1
        else:
            np.testing.assert_array_equal(A.fetch(), x)
