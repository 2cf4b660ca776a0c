"""MKL's ScaLAPACK, of the extra `mkl`, agrees with NumPy. Skipped where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import launches

# .ci/run installs it in a folder of its own: in the environment it would replace the system's.
FOLDERS = (Path(__file__).parents[2] / ".mkl/lib", Path(sys.prefix) / "lib")
COMMAND = ".venv/bin/uv pip install --python .venv/bin/python --target .mkl mkl"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_agrees_with_numpy(ranks: int) -> None:
    files = [path for folder in FOLDERS for path in folder.glob("libmkl_scalapack_lp64.so*")]
    if not files:
        pytest.skip(f"MKL is not installed: {COMMAND}")
    found = launches.results("tests.ali.ranks_scalapack_mkl:agrees", ranks, str(files[0]))
    assert found["checks"] == [8, []]
    assert "libmkl_scalapack_lp64" in found["about"]
    assert "warning" not in found["about"]
