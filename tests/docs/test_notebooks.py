"""The tutorial notebooks run as stored, on real kernels, and their stored outputs are theirs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest

from alchemist_ray import AlchemistSession
from tests.docs.notebooks import CELL_S, LOG, WIDGET, execute, notebooks
from tests.docs.pages import ROOT
from tests.support import warm_workers

NEEDS = {  # notebook: (command that must be there, how to get it)
    "4-dask-and-spark": ("java", "a Java (apt-get install default-jre-headless)"),
    "5-environments": ("cc", "a C compiler (apt-get install build-essential)"),
}
SMALLER = {"climate": {"YEARS": "10"}}  # notebook: variables of its environment
pytestmark = pytest.mark.timeout(2 * CELL_S)


def outputs(notebook: Any) -> list[set[str]]:
    """Of each code cell, the kinds of outputs that are no logs."""
    found = []
    for cell in (c for c in notebook.cells if c.cell_type == "code"):
        shown = [o.get("data", {}) for o in cell.outputs]
        kinds = {kind for data in shown if WIDGET not in data for kind in data}
        texts = [o["text"] for o in cell.outputs if o.get("name") == "stdout"]
        lines = "".join(texts).splitlines()
        if any(line.strip() and not LOG.search(line) for line in lines):
            kinds.add("stdout")
        found.append(kinds)
    return found


def stored(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, advice = NEEDS.get(path.stem, ("", ""))
    if command and shutil.which(command) is None:
        pytest.skip(f"needs {advice}")
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    if path.stem == "5-environments":
        warm_workers.import_for_rllib()
    for variable, value in SMALLER.get(path.stem, {}).items():
        monkeypatch.setenv(variable, value)
    for variable in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    try:
        executed = execute(path, tmp_path)
    finally:
        for gang in AlchemistSession.list():
            if gang.name == "tutorial":
                AlchemistSession.stop_gang("tutorial")
    assert outputs(executed) == outputs(stored(path)), "run `make tutorials`"


def test_there_are_eight_with_pictures_and_no_traces_of_a_machine() -> None:
    found = {path.stem: stored(path) for path in notebooks()}
    assert len(found) == 8
    pictures = [name for name, n in found.items() if any("image/png" in k for k in outputs(n))]
    assert len(pictures) == 7  # that of clusters is about processes
    for path in notebooks():
        text = path.read_text()
        assert len(text) < 400_000, path
        assert not re.search(
            r'"(stderr|error)"|/tmp/\w|/home/|widget-view|\d+\.\d+\.\d+\.\d+', text
        ), path


def test_the_index_and_the_readme_lead_to_them() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for path in notebooks():
        assert f"tutorials/{path.stem}\n" in index
    assert "docs/tutorials/1-start.ipynb" in (ROOT / "README.md").read_text()
