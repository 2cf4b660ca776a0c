"""The examples of the READMEs run as printed, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str, dict[str, str]]]:
    """(name, program, files it needs) of every python block; one that names a file is that file."""
    found = []
    for readme in (ROOT / "README.md", ROOT / "ali" / "README.md"):
        files: dict[str, str] = {}
        for number, block in enumerate(BLOCK.findall(readme.read_text())):
            name = re.match(r"# (\w+\.py)\n", block)
            if name:
                files[name.group(1)] = block
            elif "AlchemistSession" in block:
                where = readme.relative_to(ROOT).as_posix()
                found.append((f"{where}-{number}", block, dict(files)))
    return found


EXAMPLES = examples()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize(
    ("program", "files"), [e[1:] for e in EXAMPLES], ids=[e[0] for e in EXAMPLES]
)
def test_an_example_runs_as_printed(
    cluster: str, tmp_path: Path, program: str, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "example.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": cluster},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
