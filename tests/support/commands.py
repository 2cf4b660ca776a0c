"""Commands that tests run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ALCHEMIST = (sys.executable, "-m", "alchemist_ray.cli")


def run(
    *words: Any,
    limit_s: float = 100.0,
    env: Mapping[str, str] = os.environ,
    cwd: Path | str | None = None,
    given: str = "",
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its exit code, with `more` in its environment."""
    return subprocess.run(
        list(map(str, words)), env={**env, **more}, cwd=cwd, input=given, capture_output=True,
        text=True, timeout=limit_s, check=False,
    )  # fmt: skip


def python(program: str, *words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in Python, see `run`."""
    return run(sys.executable, "-c", textwrap.dedent(program), *words, **options)


def alchemist(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command `alchemist`, see `run`."""
    return run(*ALCHEMIST, *words, **options)
