"""Every routine of linear algebra is right, by the table of routines.

Many shapes, dtypes, layouts and kinds of matrices, on 1 to 6 ranks, in every library that has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.ali.ranks_routines import WAYS
from tests.support import launches
from tests.support.suite import scaled

RANK_COUNTS = scaled([3], [1, 2, 3, 4, 6])
# .ci/run installs it in a folder of its own: in the environment it would replace the system's.
MKL = (Path(__file__).parents[2] / ".mkl/lib", Path(sys.prefix) / "lib")
COMMAND = ".venv/bin/uv pip install --python .venv/bin/python --target .mkl mkl"


@pytest.mark.parametrize("ranks", RANK_COUNTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_routine_is_right(ranks: int, way: str) -> None:
    found = launches.results("tests.ali.ranks_routines:everything", ranks, timeout=280)[way]
    if "missing" in found:
        pytest.skip(found["missing"])
    launches.check_right(found["checks"], 3 * sum(found["done"].values()))
    assert min(found["done"].values()) >= 1


@pytest.mark.parametrize("ranks", scaled([2, 4], [1, 2, 4]))
def test_mkl_is_right(ranks: int) -> None:
    files = [path for folder in MKL for path in folder.glob("libmkl_scalapack_lp64.so*")]
    if not files:
        pytest.skip(f"MKL is not installed: {COMMAND}")
    found = launches.results(
        "tests.ali.ranks_routines:agree", ranks, "scalapack in blocks", str(files[0]), shared=False
    )
    launches.check_right(found["checks"])
