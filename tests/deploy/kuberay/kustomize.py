"""What ``kubectl kustomize`` makes of our folders, for machines without it.

Knows what our folders use and refuses the rest; a test compares it with kubectl's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Map = dict[str, Any]
KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "configMapGenerator"}


def build(folder: Path) -> list[Map]:
    """The objects that a kustomization makes."""
    return _apply(folder, [])


def with_components(base: Path, *components: Path) -> list[Map]:
    """The objects of a kustomization that names a base and components."""
    objects = build(base)
    for component in components:
        objects = _apply(component, objects)
    return objects


def _apply(folder: Path, objects: list[Map]) -> list[Map]:
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(plan) <= KNOWN, f"{folder}: {set(plan) - KNOWN} is not known here"
    for name in plan.get("resources", []):
        path = folder / name
        found = build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
        objects = [*objects, *found]
    objects = [
        *objects,
        *(_config_map(folder, spec) for spec in plan.get("configMapGenerator", [])),
    ]
    for name in plan.get("components", []):
        objects = _apply(folder / name, objects)
    for patch in plan.get("patches", []):
        objects = _patched(objects, yaml.safe_load(patch["patch"]), patch.get("target"))
    return objects


def _config_map(folder: Path, spec: Map) -> Map:
    assert spec["options"]["disableNameSuffixHash"]
    metadata = {key: spec[key] for key in ("name", "namespace")}
    metadata["labels"] = spec["options"]["labels"]
    data = {name: (folder / name).read_text() for name in spec["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patched(objects: list[Map], patch: Any, target: Map | None) -> list[Map]:
    if target is None:
        assert patch.pop("$patch") == "delete"
        left = [o for o in objects if any(o[key] != patch[key] for key in ("apiVersion", "kind"))]
        assert len(left) == len(objects) - 1
        return left
    for o in objects:
        if o["kind"] == target["kind"]:
            for step in patch:
                _step(o, step)
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
    else:
        assert step["op"] == "replace"
        assert last in place, f"{step['path']}: nothing there to replace"
        place[last] = step["value"]
