"""The examples of the READMEs run as printed, each in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "ali/README.md", "envs/README.md", "envs/rayleigh_benard/README.md")
RUNS = ("AlchemistSession", "import ray, alchemist_ray", "HPCSimulator")  # what a program has
NEEDS = {  # word of a program: (command that must be there, how to get it)
    "rayleigh_benard": ("cc", "a C compiler (apt-get install build-essential)"),
    "init_spark": ("java", "a Java (apt-get install default-jre-headless)"),
}
BLOCK = re.compile(r"^```(python|c)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str, dict[str, str]]]:
    """(name, program, files it needs) of every python block; one that names a file is that file."""
    found = []
    for name in READMES:
        readme = ROOT / name
        files: dict[str, str] = {}
        for number, (_, block) in enumerate(BLOCK.findall(readme.read_text())):
            file = re.match(r"(?:#|//) (\w+\.(?:py|c))\n", block)
            if file:
                files[file.group(1)] = block
            elif "import " in block and any(word in block for word in RUNS):
                if any(block == other for _, other, _ in found):
                    continue  # it stands in two READMEs
                found.append((f"{readme.relative_to(ROOT)}-{number}", block, dict(files)))
    return found


EXAMPLES = examples()


def build(folder: Path, target: str) -> None:
    """Run the README's command that makes a file, with this environment's tools."""
    (command,) = re.findall(rf"^.*-o {target} .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    tools = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize(
    ("program", "files"), [e[1:] for e in EXAMPLES], ids=[e[0] for e in EXAMPLES]
)
def test_an_example_runs_as_printed(
    cluster: str, tmp_path: Path, program: str, files: dict[str, str]
) -> None:
    for word, (command, advice) in NEEDS.items():
        if word in program and shutil.which(command) is None:
            pytest.skip(f"needs {advice}")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        if name.endswith(".c") and f"lib{name[:-2]}.so" in program:
            if shutil.which("cc") is None:
                pytest.skip("needs a C compiler (apt-get install build-essential)")
            build(tmp_path, f"lib{name[:-2]}.so")
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
