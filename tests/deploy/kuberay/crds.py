"""KubeRay's custom resources as JSON schemas: the copy in tests/data, and how it was made.

    go mod download -json github.com/ray-project/kuberay/ray-operator@v1.6.2   # says its folder
    python -m tests.deploy.kuberay.crds FOLDER/config/crd/bases

Descriptions are left out, and it is compressed: 2 MB become 20 kB. Nothing else is changed.
KubeRay is Apache-2.0, as we are; the copy names its owners.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import yaml

COPY = Path(__file__).parents[2] / "data" / "kuberay" / "crds-v1.6.2.json.gz"
MODULE = "github.com/ray-project/kuberay/ray-operator"
FILES = ("ray.io_rayclusters.yaml", "ray.io_rayjobs.yaml")
NOTICE = (
    "From github.com/ray-project/kuberay/ray-operator v1.6.2, config/crd/bases: the "
    "openAPIV3Schema of ray.io/v1, without descriptions. "
    "By the KubeRay authors, under the Apache License, Version 2.0 (see LICENSE)."
)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 1 MB each


def has_go() -> bool:
    """Whether Go is here, in whose cache of modules KubeRay may be."""
    return shutil.which("go") is not None


def go_environment() -> dict[str, str]:
    """The environment that Go needs; it may not fetch anything."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "GOMODCACHE") if key in os.environ}
    return {**kept, "GOPROXY": "off", "GOFLAGS": "-mod=mod"}


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema after a change of each schema in it, inner ones first."""
    if isinstance(schema, list):
        return [_changed(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return change(
        {
            key: {name: _changed(field, change) for name, field in value.items()}
            if key == "properties"
            else _changed(value, change)
            for key, value in schema.items()
        }
    )


def _bare(schema: dict[str, Any]) -> dict[str, Any]:
    """Without descriptions, which are half of it. A property may have that name."""
    return {
        key: value
        for key, value in schema.items()
        if key != "description" or not isinstance(value, str)
    }


def copy(folder: Path) -> dict[str, Any]:
    """The copy, made from KubeRay's own files."""
    schemas: dict[str, Any] = {}
    for name in FILES:
        crd = yaml.load((folder / name).read_text(), LOADER)["spec"]
        for version in crd["versions"]:
            if version["name"] == "v1":
                schemas[crd["names"]["kind"]] = _changed(
                    version["schema"]["openAPIV3Schema"], _bare
                )
    return {"$comment": NOTICE, "kinds": schemas}


def _strict(made: dict[str, Any]) -> dict[str, Any]:
    """As the API server reads it: fields that the schema does not name are errors."""
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    open_ended = made.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in made
    if "properties" in made and not open_ended:
        made["additionalProperties"] = False
    return made


def stored() -> dict[str, Any]:
    """The copy in tests/data."""
    return json.loads(gzip.decompress(COPY.read_bytes()))


def validators() -> dict[str, jsonschema.Draft202012Validator]:
    """A validator for each kind of KubeRay's that we use."""
    found = {}
    for kind, schema in stored()["kinds"].items():
        strict = _changed(schema, _strict)
        strict["properties"]["metadata"] = {"type": "object"}
        found[kind] = jsonschema.Draft202012Validator(strict)
    return found


if __name__ == "__main__":
    COPY.parent.mkdir(parents=True, exist_ok=True)
    COPY.write_bytes(gzip.compress(json.dumps(copy(Path(sys.argv[1]))).encode(), mtime=0))
