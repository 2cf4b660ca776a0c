"""Parts that all Kubernetes objects of a cluster share: metadata and selectors."""

from __future__ import annotations

from typing import Any

from alchemist_ray.deploy.kubernetes.options import ClusterOptions

Map = dict[str, Any]


def make_object(o: ClusterOptions, api: str, kind: str, name: str, **fields: Any) -> Map:
    """Return an object in the cluster's namespace, with its labels."""
    labels = {
        "app.kubernetes.io/part-of": "alchemist-on-ray",
        "app.kubernetes.io/instance": o.name,
    }
    metadata: Map = {"name": name, "namespace": o.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def members(o: ClusterOptions, *components: str) -> Map:
    """Return a selector of the cluster's pods with one of these components."""
    return {
        "matchLabels": {"app.kubernetes.io/instance": o.name},
        "matchExpressions": [
            {
                "key": "app.kubernetes.io/component",
                "operator": "In",
                "values": list(components),
            }
        ],
    }
