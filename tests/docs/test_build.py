"""The documentation builds without a warning: broken links and bad docstrings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.support import commands

BUILD_S = 300


@pytest.mark.timeout(BUILD_S + 30)
def test_the_documentation_builds_and_has_the_public_names(tmp_path: Path) -> None:
    commands.output(
        sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs",
        "-d", tmp_path / "doctrees", ".", tmp_path / "html", cwd=ROOT, limit_s=BUILD_S,
    )  # fmt: skip
    api = "".join(page.read_text() for page in (tmp_path / "html" / "docs" / "api").glob("*.html"))
    for name in (
        "alchemist_ray.AlchemistSession.send_matrix",
        "alchemist_ray.Handle.fetch",
        "alchemist_ray.mpi_function",
        "alchemist_ray.errors.GroupFailedError",
        "alchemist_ray.clients.dask.linalg.svd",
        "alchemist_ray.clients.spark.init_spark",
        "ali.Context.to_layout",
        "ali.testing.LibraryTests",
        "envs.HPCSimulatorEnv.step",
        "envs.rllib.configure",
    ):
        assert f'id="{name}"' in api, name
