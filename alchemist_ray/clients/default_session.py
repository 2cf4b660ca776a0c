"""Which session the drop-in functions of the clients use: the one that this process has open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alchemist_ray.errors import SessionError
from alchemist_ray.runtime import gang_owner

if TYPE_CHECKING:
    from alchemist_ray.session import AlchemistSession


def current_session() -> AlchemistSession:
    """The one open session of this process that has workers.

    Raises
    ------
    SessionError
        If there is none, or more than one.
    """
    from alchemist_ray.session import AlchemistSession  # noqa: PLC0415

    found = [
        s for s in gang_owner._open if isinstance(s, AlchemistSession) and s._client is not None
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise SessionError(
            "there is no open session with workers: AlchemistSession(4) first, which starts 4"
        )
    names = ", ".join(sorted(session.id for session in found))
    raise SessionError(
        f"{len(found)} sessions are open ({names}): say which one with session=..., or close the "
        "others"
    )
