"""The end of a program closes each of its sessions."""

from __future__ import annotations

from tests.support import commands

PROGRAM = """
from alchemist_ray.gang import owner

closed = []

class Session:
    def __init__(self, name):
        self.name = name

    def close(self):
        closed.append(self.name)
        if self.name == "first":
            raise RuntimeError("it cannot be closed")

sessions = [Session("first"), Session("second")]
for session in sessions:
    owner._sessions.add(session)
owner._close_all()
print(sorted(closed))
owner._sessions.clear()
"""


def test_a_session_that_cannot_be_closed_keeps_no_other_open() -> None:
    done = commands.python(PROGRAM)
    assert done.stdout == "['first', 'second']\n", done.stderr
    assert "was not closed in good order" in done.stderr
