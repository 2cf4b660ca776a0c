"""The table of a gang's commands: each operation, its handler and its fields."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from alchemist_ray.runtime.commands import Commands
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

Queued = Callable[[Commands, Body, str], Awaitable[Body]]
Immediate = Callable[[Commands, Body, str], Body]


class Command(NamedTuple):
    """An operation: its handler, and the fields that a caller gives (``?``: optional).

    Every command also has ``id``, and may have ``timeout_s`` (seconds, with the time in the
    queue) and ``output`` (whether the caller shows what ranks print).
    """

    fields: tuple[str, ...]
    queued: Queued | None = None
    immediate: Immediate | None = None


COMMANDS: dict[str, Command] = {
    "create": Command(
        ("shape", "dtype", "layout", "name?", "source?", "columns?"), Commands.create
    ),
    "seal": Command(("matrix",), Commands.seal),
    "free": Command(("matrices", "forced?"), Commands.free),
    "redistribute": Command(("source", "layout", "name?"), Commands.redistribute),
    "load": Command(("library", "path?"), Commands.load),
    "call": Command(("library", "routine", "arguments", "columns?"), Commands.call),
    "run": Command(("task", "uses", "pure?"), Commands.run),
    "keep_copies": Command((), Commands.run_own),
    "resize": Command(("matrices",), Commands.run_own),
    "discard": Command(("names",), Commands.discard),
    "release": Command(("matrices",), immediate=Commands.release),
    "hold": Command(("matrices",), immediate=Commands.hold),
    "pin": Command(("matrices",), immediate=Commands.pin),
    "list_matrices": Command((), immediate=Commands.list_matrices),
    "describe": Command(
        ("matrix", "name?", "pin?", "source?", "columns?"), immediate=Commands.describe
    ),
    "touch": Command((), immediate=Commands.touch),
    "resume": Command(("matrices",), immediate=Commands.resume),
    "sources": Command(("matrices",), immediate=Commands.sources),
    "list_libraries": Command((), immediate=Commands.list_libraries),
    "ping": Command(("wait?", "workers?"), immediate=Commands.ping),
    "checkpointed": Command(("matrices", "states?"), immediate=Commands.checkpointed),
    "file_stamp": Command(("matrix", "stamp"), immediate=Commands.file_stamp),
    "remove_files": Command(("names",), immediate=Commands.remove_files),
}

_NEEDED = {
    op: tuple(name for name in command.fields if not name.endswith("?"))
    for op, command in COMMANDS.items()
}


def checked(body: Body) -> Command:
    """The command that a body asks for. Raises `Failure` if it is unknown or lacks fields."""
    op = body.get("op")
    command = COMMANDS.get(op) if isinstance(op, str) else None
    if command is None or not isinstance(op, str):
        raise Failure("GroupError", f"unknown command {op!r}")
    if missing := [name for name in _NEEDED[op] if name not in body]:
        raise Failure("GroupError", f"malformed command {op!r}: it needs {', '.join(missing)}")
    limit_s = body.get("timeout_s")
    if limit_s is not None and not (isinstance(limit_s, int | float) and limit_s > 0):
        raise Failure("BadArgumentError", f"timeout_s={limit_s!r}: it must be greater than 0")
    return command
