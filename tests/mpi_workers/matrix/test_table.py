"""The table of a rank's matrices, as the next process of the rank reads it."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_workers.matrix.table import UNIT, MatrixTable, Row, rows

LAYOUTS = st.sampled_from(["VC_STAR", "ROWS:9x9:float64:" + "1," * 300])


def row(ident: int, layout: str = "VC_STAR", sealed: bool = True) -> Row:
    return Row(ident, {"segment": ident + 7, "layout": layout}, sealed, False, 0, 0)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "unsealed", "remove", "seal", "taint", "count"]),
            st.integers(1, 6),
            LAYOUTS,
        ),
        max_size=60,
    )
)
def test_a_table_has_what_was_put_last(orders: list[tuple[str, int, str]]) -> None:
    table, there = MatrixTable(), dict[int, Row]()
    for number, (order, ident, layout) in enumerate(orders):
        if order in ("put", "unsealed"):
            there[ident] = row(ident, layout, order == "put")
            table.put(there[ident])
        elif order == "remove":
            there.pop(ident, None)
            table.remove(ident)
        elif ident in there and order == "seal":
            there[ident] = there[ident]._replace(sealed=True)
            table.mark(ident, sealed=True)
        elif ident in there and order == "taint":
            there[ident] = there[ident]._replace(tainted=True)
            table.mark(ident, tainted=True)
        elif ident in there:
            there[ident] = there[ident]._replace(received=number, counted=number + 1)
            table.count(ident, number, number + 1)
    assert {found.ident: found for found in rows(table.fd)} == there
    os.close(table.fd)


def test_freed_rows_are_used_again() -> None:
    table = MatrixTable()
    for ident in range(1000):
        table.put(row(ident))
        table.remove(ident - 3)
    assert os.fstat(table.fd).st_size <= 5 * UNIT
    os.close(table.fd)


@pytest.mark.parametrize("nbytes", [1, 24, 30, 127])
def test_a_row_that_was_half_written_is_left_out(nbytes: int) -> None:
    table = MatrixTable()
    for ident in range(3):
        table.put(row(ident))
    os.ftruncate(table.fd, 2 * UNIT + nbytes)
    assert [found.ident for found in rows(table.fd)][:2] == [0, 1]
    os.close(table.fd)
