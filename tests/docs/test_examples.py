"""Every Python block of the documentation runs as printed. The blocks of a page share a process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.docs.pages import Block, Page, pages
from tests.support import warm_workers

PAGES = {page.name: page for page in pages()}
NEEDS = {  # word of a program: (command that must be there, how to get it)
    "rayleigh_benard": ("cc", "a C compiler (apt-get install build-essential)"),
    r"run_program\(\[\"\./": ("cc", "a C compiler (apt-get install build-essential)"),
    r"lib\w+\.so": ("cc", "a C compiler (apt-get install build-essential)"),
    r"libf\w+\.so": ("gfortran", "gfortran (apt-get install gfortran)"),
    "init_spark": ("java", "a Java (apt-get install default-jre-headless)"),
}
PAGE_S = 240  # all blocks of a page
pytestmark = pytest.mark.timeout(PAGE_S + 60)

_results: dict[str, dict[str, dict[str, str]]] = {}


def missing(block: Block) -> str | None:
    """The programs that a block needs and this machine lacks."""
    for word, (command, advice) in NEEDS.items():
        if re.search(word, block.source) and shutil.which(command) is None:
            return f"needs {advice}"
    return None


def run(
    page: Page,
    folder: Path,
    cluster: str,
    *,
    python: Path = Path(sys.executable),
    limit_s: float = PAGE_S,
    more: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, dict[str, str]]:
    """Run a page, with `more` in its environment.

    For every block that was begun its output and its traceback.
    """
    env = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "RAY_ADDRESS": cluster}
    env |= more
    for name, text in page.files.items():
        (folder / name).write_text(text)
    for target, command in page.commands.items():
        if any(target in b.source and not missing(b) for b in page.blocks):
            done = subprocess.run(
                command, shell=True, cwd=folder, env=env, capture_output=True, text=True,
                timeout=60, check=False,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (0, ""), target
    blocks = [{**asdict(b), "name": b.name} for b in page.blocks if not missing(b)]
    (folder / "blocks.json").write_text(json.dumps(blocks))
    runner = Path(__file__).with_name("run_page.py")
    words = [str(python), str(runner), "blocks.json", "results.json"]
    with (folder / "stderr").open("w") as stderr:
        try:
            status = str(
                subprocess.run(
                    words, cwd=folder, env=env, stderr=stderr, timeout=limit_s, check=False
                ).returncode
            )
        except subprocess.TimeoutExpired:
            status = f"not ended after {limit_s} s"
    results = folder / "results.json"
    lines = results.read_text().splitlines() if results.exists() else []
    found = {result["name"]: result for result in map(json.loads, lines)}
    said = f"the page's process: {status}\n{(folder / 'stderr').read_text()[-3000:]}"
    for block in blocks:
        found.setdefault(block["name"], {"output": "", "error": said})
    found["exit"] = {"output": "", "error": "" if status == "0" else said}
    return found


def test_the_documentation_has_examples() -> None:
    assert sum(len(page.blocks) for page in PAGES.values()) >= 20
    assert "README.md" in PAGES


@pytest.mark.parametrize(
    "block", [b for page in PAGES.values() for b in page.blocks], ids=lambda block: block.name
)
def test_an_example_runs_as_printed(
    cluster: str, tmp_path_factory: pytest.TempPathFactory, block: Block
) -> None:
    if reason := missing(block):
        pytest.skip(reason)
    if block.page not in _results:
        folder = tmp_path_factory.mktemp("page")
        if any("rllib" in each.source for each in PAGES[block.page].blocks):
            warm_workers.import_for_rllib()
        _results[block.page] = run(PAGES[block.page], folder, cluster)
    result = _results[block.page][block.name]
    assert not result["error"], result["error"]
    assert "print(" not in block.source or result["output"].strip()
    assert not _results[block.page]["exit"]["error"], _results[block.page]["exit"]["error"]
