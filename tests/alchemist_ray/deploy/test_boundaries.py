"""Deployment code is optional: sessions work without it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ALLOWED = {"deploy", "observe", "cli.py"}  # commands


def test_only_commands_import_deployment_code() -> None:
    package = ROOT / "alchemist_ray"
    importers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"^\s*(from|import) alchemist_ray\.deploy", path.read_text(), re.M)
    }
    assert {name.partition("/")[0] for name in importers} <= ALLOWED, sorted(importers)
