"""Executes the tutorial notebooks of docs/tutorials on real kernels.

``python -m tests.docs.notebooks [NAME ...]`` also stores their outputs, as ``make tutorials`` does.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "tutorials"
CELL_S = 180
WIDGET = "application/vnd.jupyter.widget-view+json"  # a progress bar, of a call that took long
LOG = re.compile(r"\b(INFO|WARN|ERROR) \w+")  # a line of Spark's


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path, folder: Path) -> Any:
    """The notebook with its outputs, executed in a folder. Raises `CellExecutionError`."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, kernel_name="python3", timeout=CELL_S,
        resources={"metadata": {"path": str(folder)}},
    ).execute()  # fmt: skip
    return notebook


def without_traces(notebook: Any, folder: Path) -> Any:
    """The notebook as it is stored: without logs and without paths of this machine."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [
                o for o in cell.outputs
                if o.get("name") != "stderr" and WIDGET not in o.get("data", {})
            ]  # fmt: skip
            for output in cell.outputs:
                if "text" in output:
                    lines = output["text"].replace(f"{folder}/", "").splitlines(keepends=True)
                    output["text"] = "".join(line for line in lines if not LOG.search(line))
            cell.outputs = [o for o in cell.outputs if o.get("text", "x").strip()]
    return notebook


def main(names: list[str]) -> None:
    import ray  # noqa: PLC0415 - with the environment of `make`

    if "RAY_ADDRESS" not in os.environ:
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    for path in notebooks():
        if names and path.stem not in names:
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(without_traces(execute(path, Path(folder)), Path(folder)), path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
