"""Ray's ObjectRef for code that also runs where Ray is not installed."""

from __future__ import annotations

from typing import Any

try:
    import ray
    from ray import ObjectRef
except ImportError:

    class ObjectRef:  # type: ignore[no-redef]
        """Stands in for Ray's; no object is an instance of it."""


__all__ = ["ObjectRef", "resolved"]


def resolved(value: Any) -> Any:
    """The value of an ObjectRef (waits for it); any other value as it is."""
    return ray.get(value) if isinstance(value, ObjectRef) else value
