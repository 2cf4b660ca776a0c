"""The part of ``kubectl kustomize`` that our folders use, for machines without kubectl.

It refuses all other features; a test compares its results with kubectl's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Map = dict[str, Any]
KNOWN = {"apiVersion", "kind", "resources", "patches"}


def build(folder: Path) -> list[Map]:
    """Return the objects that a kustomization makes."""
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(plan) <= KNOWN, f"{folder}: {set(plan) - KNOWN} is not supported here"
    objects: list[Map] = []
    for name in plan["resources"]:
        path = folder / name
        objects += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for patch in plan.get("patches", []):
        objects = _patched(objects, yaml.safe_load(patch["patch"]), patch.get("target"))
    return objects


def _patched(objects: list[Map], patch: Any, target: Map | None) -> list[Map]:
    if target is None:
        assert patch.pop("$patch") == "delete"
        left = [o for o in objects if any(o[key] != patch[key] for key in ("apiVersion", "kind"))]
        assert len(left) == len(objects) - 1
        return left
    [chosen] = [o for o in objects if (o["kind"], o["metadata"]["name"]) == tuple(target.values())]
    for step in patch:
        _step(chosen, step)
    return objects


def _step(document: Map, step: Map) -> None:
    """One operation of RFC 6902."""
    *way, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
    place: Any = document
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if step["op"] == "add" and isinstance(place, list):
        assert last == "-"
        place.append(step["value"])
    elif step["op"] == "add":
        place[last] = step["value"]
    elif step["op"] == "remove":
        del place[last]
    else:
        assert step["op"] == "replace"
        key = int(last) if isinstance(place, list) else last
        assert place[key] is not None, f"{step['path']}: nothing there to replace"
        place[key] = step["value"]
