"""Expressions that are recorded: the same results, in fewer commands."""

from __future__ import annotations

import gc
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ali.arrays
from alchemist_ray import AlchemistSession
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.attached.connection import WRITE_ARRAYS
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.errors import (
    BadArgumentError,
    CancelledError,
    MatrixError,
    MatrixNotFoundError,
    ResourceError,
)
from tests.alchemist_ray.arrays.checks import dtypes, few, layouts, same, values
from tests.support import traces

OPERATIONS: dict[str, Any] = {
    "+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y,
    "scaled": lambda x, y: 3 - x * 2.5, "whole": lambda x, y: x * 2 + 1, "abs": lambda x, y: abs(x),
    "square": lambda x, y: np.square(x), "less": lambda x, y: x < y,
    "where": lambda x, y: np.where(x < y, x, y), "choose": lambda x, y: np.where(x < y, x, 0),
    "chosen": lambda x, y: np.where((x > 1).astype(bool), 2.5, y),
    "row": lambda x, y: x + np.arange(x.shape[-1]), "min": lambda x, y: np.minimum(x, y),
    "cast": lambda x, y: (x > 1).astype("int64"), "sqrt": lambda x, y: np.sqrt(abs(x)),
    "divide": lambda x, y: x / (1 + abs(y)), "centred": lambda x, y: x - y.mean(axis=0),
}  # fmt: skip
ENDS: dict[str, Any] = {
    "fetch": lambda x: x, "sum": lambda x: x.sum(), "mean": lambda x: x.mean(axis=0),
    "max": lambda x: x.max(axis=-1), "std": lambda x: x.std(), "any": lambda x: (x > 1).any(axis=0),
    "rows": lambda x: x[1:3], "total": lambda x: x.sum(axis=0, keepdims=True) + 1,
}  # fmt: skip


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)),
        min_size=1, max_size=12,
    ),
    end=st.sampled_from(sorted(ENDS)), kinds=st.tuples(dtypes, dtypes),
    layouts=st.tuples(layouts, layouts), shape=st.sampled_from([(9, 7), (6,), (5, 3, 4), (1, 4)]),
)  # fmt: skip
@few
def test_recorded_and_eager_programs_give_the_same_bits(
    session: AlchemistSession, steps: Any, end: str, kinds: Any, layouts: Any, shape: Any
) -> None:
    given_ = [values(shape, kind, k) for k, kind in enumerate(kinds)]
    found = []
    for eager in (False, True):
        session.eager = eager
        try:
            with np.errstate(all="ignore"):
                held = [
                    session.send_matrix(a, layout=x) for a, x in zip(given_, layouts, strict=True)
                ]
                try:
                    for name, i, j in steps:
                        held.append(
                            OPERATIONS[name](held[-1 - i % len(held)], held[-1 - j % len(held)])
                        )
                        if j > 6 and len(held) > 3:
                            del held[2]
                    result = ENDS[end](held[-1])
                    found.append(
                        (result.shape, result.dtype, result.layout, result.fetch().tobytes())
                    )
                except (TypeError, ValueError, OverflowError) as error:
                    found.append(type(error))
        finally:
            session.eager = False
    assert found[0] == found[1]


def test_an_expression_is_one_command(session: AlchemistSession, sent: list[str]) -> None:
    a = values((50, 8), "float64")
    A, B = session.send_matrix(a), session.send_matrix(a + 1)
    sent.clear()
    same((A * 2 + B).sum(), (a * 2 + (a + 1)).sum())
    assert sent == ["evaluate"]
    same(np.sqrt(A * A + B * B), np.sqrt(a * a + (a + 1) ** 2))
    total, expected = A, a
    for _ in range(20):
        total, expected = total - 0.5, expected - 0.5
    same(total, expected)
    assert sent == ["evaluate"] * 3
    assert A.sum() is not None
    assert sent[3:] == ["reduce"]


def test_a_product_with_a_transposed_operand_is_one_command(
    session: AlchemistSession, sent: list[str]
) -> None:
    a = values((50, 8), "float64")
    A = session.send_matrix(a)
    before = A.T
    sent.clear()
    product = (A.T @ A).fetch()
    same(A.T @ np.ones(50), a.T @ np.ones(50))
    assert sent[0] == "matmul"
    assert "transpose" not in sent
    assert np.array_equal(product, product.T)  # half of it is computed
    np.testing.assert_allclose(product, a.T @ a)
    A *= 2  # the transposed one is of the time before
    same(before, a.T)
    same(before @ A, 2 * (a.T @ a))


def test_the_plan_of_an_expression(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones((3, 2)))
    B = np.abs(A * 2 + A)
    name = A.name
    assert B.plan() == [f"multiply({name}, 2.0)", f"add(step 1, {name})", "abs(step 2)"]
    assert B.recording
    assert (B.computed().plan(), A.plan()) == ([], [])


def test_a_copy_of_everything_is_made_when_it_is_needed(
    session: AlchemistSession, sent: list[str]
) -> None:
    a = values((6, 4), "float64")
    A = session.send_matrix(a)
    sent.clear()
    part = A[:, :][...][[1, 3]]  # as xarray takes a part along one axis
    assert sent == ["part"]
    same(part, a[[1, 3]])
    S = A[:]
    assert S.recording
    with pytest.raises(MatrixError, match=f"is a copy of elements of {A.name}"):
        S += 1
    A += 1
    same(S, a)
    same(A, a + 1)


def test_the_shape_and_the_dtype_are_known_before(
    session: AlchemistSession, sent: list[str]
) -> None:
    A, v = session.send_matrix(np.ones((4, 3), "int32")), session.send_matrix(np.ones(3))
    sent.clear()
    found = (A + v) * 2 > 1
    assert (found.shape, found.dtype, found.ndim, found.nbytes) == ((4, 3), np.dtype(bool), 2, 12)
    assert len(found) == 4
    assert (A + 1).sum(axis=0).dtype == np.int64
    assert sent == []
    assert found.layout == A.layout
    assert found.name.startswith("matrix")
    with pytest.raises(ValueError, match="do not broadcast"):
        (A + 1) + session.xp.ones((5, 5))


def test_operands_are_those_of_the_time(session: AlchemistSession) -> None:
    a = values((6, 4), "float64")
    A = session.send_matrix(a)
    before, row = A + 1, A[0] * 2
    A[2] = 100.0
    same(before, a + 1)
    doubled = A * 2
    A += 5
    same(doubled - A * 0, np.where(np.arange(6)[:, None] == 2, 200.0, a * 2))
    same(row, a[0] * 2)
    squares = A * A
    session.run(lambda comm, x: x.local.fill(3), A)
    assert float(squares[2, 0]) == 105.0**2
    assert float((A * A)[0, 0]) == 9
    later = A * 2
    del A
    gc.collect()
    assert float(later.max()) == 6


def test_the_routines_that_write_are_those_that_say_so() -> None:
    made = {name: getattr(ali.arrays, name) for name in ali.arrays.__all__}
    declared = {n for n, f in made.items() if getattr(f, "__alchemist_writes__", None)}
    assert declared == WRITE_ARRAYS


def test_a_recorded_expression_does_not_delay_a_cancel(session: AlchemistSession) -> None:
    def wait(comm: Any) -> None:
        while True:
            comm.barrier()
            time.sleep(0.01)

    A = session.send_matrix(np.ones(5))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(session.run, wait)
        while not session.list_calls():
            time.sleep(0.01)
        B = A + 1  # it would be computed after the call
        begun = traces.clock()
        assert session.cancel() == 1
        assert traces.clock() - begun < 5
        with pytest.raises(CancelledError):
            call.result(20)
    same(B, np.full(5, 2.0))


def test_nothing_is_left_and_what_is_listed_is_there(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones((5, 5)))
    B = A * 2 + 1
    assert {h.name for h in session.list_matrices()} == {A.name, B.name}
    C = (A + 1) * B
    assert float(C.sum()) == 150
    del A, B, C
    assert session.list_matrices() == []


def test_a_recorded_handle_can_be_sent_away(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones((5, 5)))
    same(pickle.loads(pickle.dumps(A + 1)), np.full((5, 5), 2.0))
    B = A + 2
    pickle.dumps(A)  # another process may change it from now on
    assert not B.recording
    C = A + 3
    assert not C.recording


def test_many_operands_and_long_chains(session: AlchemistSession) -> None:
    a = values((4, 3), "float64")
    held = [session.send_matrix(a * k) for k in range(20)]
    same(sum(held[1:], start=held[0]), a * 190)
    found, expected = held[1], a
    for k in range(300):
        found, expected = np.minimum(found * 1.01, k), np.minimum(expected * 1.01, k)
    same(found, expected)
    rows = [np.full(1 << 16, float(k)) for k in range(6)]
    wide = session.xp.zeros((2, 1 << 16))
    for row in rows:
        wide = wide + row
    same(wide, np.full((2, 1 << 16), 15.0))


def test_values_that_others_use_are_not_computed_again_and_again(
    session: AlchemistSession, sent: list[str]
) -> None:
    A = session.send_matrix(np.ones((5, 5)))
    shared = A * 2
    sent.clear()
    for k in range(5):
        assert float((shared + k).sum()) == 25 * (2 + k)
    assert not shared.recording
    assert sent.count("elementwise_scalar") == 1


def test_what_fails_says_where_the_expression_is(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones((300_000, 1)))
    wide = session.xp.ones((1, 400_000))
    with pytest.raises(ResourceError):
        A + wide  # a result far larger than its operands is made at once
    B = session.send_matrix(np.ones(5))
    C = B + 1
    recorded = C._recording
    recorded.operands["A"] = A  # what the gang refuses
    recorded.values["op"] = "nothing"
    with pytest.raises(BadArgumentError, match="op must be one of") as caught:
        C.fetch()
    assert any(f"{__file__}:" in note for note in caught.value.__notes__)


def test_freed_operands_and_named_ones_are_not_recorded(session: AlchemistSession) -> None:
    A, B = session.send_matrix(np.ones(5)), session.send_matrix(np.ones(5), name="shared")
    assert (A + 1).recording
    assert not (B + 1).recording
    assert not (A + B).recording
    A.free()
    with pytest.raises(MatrixNotFoundError):
        A + 1
    B.free()


def test_errors_of_floating_point_are_told_where_the_program_asks(
    session: AlchemistSession,
) -> None:
    A = session.send_matrix(np.array([1e300, 1.0]))
    with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="in multiply"):
        A * 1e300
    recorded = A * 1e300  # NumPy's default: a warning, which comes with the value
    with np.errstate(all="raise"), pytest.warns(RuntimeWarning, match="overflow .* in multiply"):
        recorded.fetch()
    with pytest.warns(RuntimeWarning, match="in divide"):
        (A * 2) / 0


def test_eager_sessions_record_nothing(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones(5))
    session.eager = True
    try:
        assert session.eager
        assert not (A + 1).recording
    finally:
        session.eager = False
    assert not gang_of(A).part(Engine).eager


@pytest.mark.parametrize("layout", ["VC_STAR", "MC_MR", "STAR_STAR", "MD_STAR", "CIRC_CIRC"])
def test_selected_elements_are_reduced_where_they_are(
    session: AlchemistSession, sent: list[str], layout: str
) -> None:
    a = np.random.default_rng(0).standard_normal((40, 6))
    A = session.send_matrix(a, layout=layout)
    for name in ("sum", "mean", "std", "min", "max", "prod"):
        sent.clear()
        same(getattr(A[A > 0.2], name)(), getattr(a[a > 0.2], name)())
        assert sent == ["elementwise_scalar", "reduce_elements"]
    chosen = A[A > 0.2]
    same(chosen.var(ddof=1, keepdims=True), a[a > 0.2].var(ddof=1, keepdims=True))
    assert chosen.recording
    same(chosen, a[a > 0.2])
    assert chosen.shape == a[a > 0.2].shape
    assert float(A[A > 9].sum()) == 0
    with pytest.warns(RuntimeWarning, match="Mean of empty slice"):
        assert np.isnan(float(A[A > 9].mean()))
    with pytest.raises(ValueError, match="no elements"):
        A[A > 9].max()
    same(A[A > 0] * 2, a[a > 0] * 2)
