"""The benchmark of GPUs runs without one: its checks pass, and its table has all rows."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support import commands

pytest.importorskip("torch", reason="needs torch")
PATHS = os.pathsep.join(map(os.path.abspath, sys.path))


def test_all_paths_are_right_and_all_rows_are_measured() -> None:
    options = ["--device", "cpu", "--sizes", "128", "256"]
    said = commands.output(
        sys.executable, "-m", "benchmarks.gpu", *options, limit_s=180, PYTHONPATH=PATHS
    )
    assert said.startswith("every path is right: card none: PyTorch's CPU stands in")
    for what in ("copy to the GPU", "copy from the GPU", "randomized SVD, rank 20, 2048 x 64"):
        assert said.count(f"| {what}") == 1
    for n in (128, 256):
        for dtype in ("float64", "float32"):
            for routine in ("matmul", "gram"):
                rows = said.count(f"| {routine}, n = {n}, {dtype} |")
                assert rows == 2, said  # against the host, and against PyTorch


def test_without_a_gpu_it_says_so() -> None:
    import torch  # noqa: PLC0415 - slow

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(RuntimeError, match="cannot use this rank's GPU"):
        commands.output(sys.executable, "-m", "benchmarks.gpu", limit_s=100, PYTHONPATH=PATHS)
