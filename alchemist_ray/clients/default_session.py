"""The session that the drop-in functions of the clients use when none is given."""

from __future__ import annotations

from alchemist_ray.errors import SessionError
from alchemist_ray.session.alchemist_session import AlchemistSession
from alchemist_ray.session.owner import open_sessions


def current_session(remedy: str = "choose one with session=...") -> AlchemistSession:
    """The one open session of this process that has workers; `remedy` if there are several.

    Raises
    ------
    SessionError
        If no session is open, or more than one.
    """
    found = [s for s in open_sessions() if isinstance(s, AlchemistSession)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise SessionError("there is no open session with workers: call AlchemistSession(4) first")
    names = ", ".join(sorted(session.id for session in found))
    raise SessionError(f"{len(found)} sessions are open ({names}): {remedy}, or close the others")
