"""Rank side of test_files.py: matrices saved to URLs appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ali.files import routines
from mpi_workers.matrix.dist_matrix import DTYPES
from mpi_workers.matrix.layout import LAYOUTS
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_files import Checks, agreed, bits, read_alone, same, values
from tests.ali.ranks_files_bad import break_it


def url_round_trips(gang: Gang, folder: Path) -> int:
    """Zarr behind a URL: the same bits, also to Zarr itself; chunks of zeros as well."""
    check = Checks(gang, folder)
    path = folder / "A.zarr"
    sides = st.sampled_from([0, 1, 2, 5, 23])

    @agreed(gang, 12)
    @given(
        shape=st.tuples(sides, sides) | st.tuples(sides),
        dtype=st.sampled_from(DTYPES),
        layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
        salt=st.integers(0, 99),
    )
    def there_and_back(
        shape: tuple[int, ...], dtype: str, layouts: tuple[str, str], salt: int
    ) -> None:
        array = values(shape, dtype, salt) if salt % 3 else np.zeros(shape, dtype)
        matrix = check.ctx.new_replicated(array, layouts[0])
        routines.save(check.ctx, matrix, f"file://{path}")
        found = check.whole(check.load(f"file://{path}", layout=layouts[1]))
        wrong = not same(array, found, ".zarr") or not same(array, read_alone(path, dtype), ".zarr")
        check.agree(f"{shape} {dtype} {layouts} {salt}: not what was saved" if wrong else None)
        check.by_rank_0(lambda: shutil.rmtree(path))

    there_and_back()
    return check.done


def url_atomic(gang: Gang, folder: Path) -> list[str]:
    """A save that fails leaves nothing there; one over something is refused."""
    check = Checks(gang, folder)
    wrong = []
    path = folder / "A.zarr"
    url = f"file://{path}"
    matrix = check.ctx.new_replicated(values((40, 4), "float64", 4), "VC_STAR")
    for fails in ("writing", "ending", "publishing"):
        with pytest.MonkeyPatch.context() as patch:
            break_it(patch, gang, "url", fails)
            said = check.said(lambda: routines.save(check.ctx, matrix, url))
        if "No space left on device" not in said or f"FileError: {url}" not in said:
            wrong.append(f"{fails}: {said}")
        gang.comm.Barrier()
        if path.exists():
            wrong.append(f"{fails}: left {os.listdir(path)}")
        gang.comm.Barrier()
    check.by_rank_0(lambda: (path / "c" / "7").mkdir(parents=True))  # as a killed gang leaves it
    routines.save(check.ctx, matrix, url)
    before = bits(check.whole(check.load(url)))
    said = check.said(lambda: routines.save(check.ctx, matrix, url))
    if not said.startswith(f"FileError: {url} exists, and a URL cannot"):
        wrong.append(f"over another: {said}")
    if bits(check.whole(check.load(url))) != before:
        wrong.append("the other one was changed")
    return wrong
