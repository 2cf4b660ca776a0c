"""A failure as it travels: kind, words and facts, with no class attached.

The rank side raises `Failure`; a frame carries its map; `alchemist_ray.errors`
turns the kind into the class of the same name that the user sees.
"""

from __future__ import annotations

from typing import Any


class Failure(Exception):
    """Something went wrong that the user must be told about.

    Parameters
    ----------
    kind : str
        Name of an error class of `alchemist_ray.errors`.
    message : str
        Which thing, what happened, what to do.
    **facts
        Further details (msgpack types only), e.g. ``rank``, ``traceback``.
    """

    def __init__(self, kind: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.facts = facts

    def to_map(self) -> dict[str, Any]:
        return {"kind": self.kind, "message": self.message, "facts": self.facts}

    @classmethod
    def from_map(cls, fields: dict[str, Any]) -> Failure:
        failure = cls(
            str(fields.get("kind", "AlchemistError")),
            str(fields.get("message", "the other side gave no reason")),
        )
        facts = fields.get("facts")
        if isinstance(facts, dict):
            failure.facts.update(facts)
        return failure

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure.from_map, (self.to_map(),)


class Interrupted(Exception):
    """Raised inside a routine on one rank because the call failed elsewhere or was cancelled."""
