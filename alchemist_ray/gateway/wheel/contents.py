"""Which files the distribution alchemist-client has: those that its roots import on load."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
# Modules that users import, or that are imported by name: `attached.registry`, `transfer.sources`.
ROOTS = (
    "alchemist_ray",
    "alchemist_ray.session.alchemist_session",
    "alchemist_ray.arrays.namespace",
    "alchemist_ray.gateway.client",
    "alchemist_ray.clients.arrow",
    "alchemist_ray.clients.pandas",
)
PACKAGES = ("alchemist_ray", "mpi_workers")


def files() -> dict[str, Path]:
    """The files, by their path in the wheel."""
    found: dict[str, Path] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        path = _path_of(name)
        if path is None or (key := path.relative_to(ROOT).as_posix()) in found:
            continue
        found[key] = path
        waiting += _imported(path)
        waiting.append(name.rpartition(".")[0])  # its package, and so on
    return found


def _path_of(name: str) -> Path | None:
    """The file of a module or package of ours; None for names of others, and in a module."""
    if name.partition(".")[0] not in PACKAGES:
        return None
    base = ROOT.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imported(path: Path) -> Iterator[str]:
    """Modules that a file imports when it is loaded: not in functions, nor for type checkers."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def get_build_hook() -> Any:
    """Hatch's entry point: the class of the hook."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # noqa: PLC0415

    class Hook(BuildHookInterface):  # type: ignore[misc,type-arg,unused-ignore]
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            build_data["force_include"].update({str(path): key for key, path in files().items()})
            build_data["force_include"][str(ROOT / "LICENSE")] = "alchemist_ray/LICENSE"

    return Hook
