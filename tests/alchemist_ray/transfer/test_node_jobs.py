"""Which objects of the store an agent opens at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray.transfer.node_jobs import OPENED, together

SIZES = st.lists(st.integers(0, 2 * OPENED) | st.integers(0, OPENED // 8), max_size=60)


@given(sizes=SIZES)
def test_all_are_opened_once_in_order_and_never_much_at_once(sizes: list[int]) -> None:
    groups = [list(range(len(sizes)))[some] for some in together(sizes)]
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    assert all(groups)
    for group in groups:  # an unknown size may be any: nothing is opened after it
        assert sum(sizes[i] or OPENED for i in group[:-1]) < OPENED


@given(sizes=SIZES)
def test_small_objects_are_opened_in_groups(sizes: list[int]) -> None:
    groups = [list(range(len(sizes)))[some] for some in together(sizes)]
    for group in groups[:-1]:
        assert sum(sizes[i] or OPENED for i in group) >= OPENED
