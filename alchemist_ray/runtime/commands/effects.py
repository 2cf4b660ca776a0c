"""Effects of commands: what they change, and whether they can be repeated."""

from __future__ import annotations

from collections.abc import Mapping

from alchemist_ray.runtime.commands.loaded_libraries import LoadedLibraries
from alchemist_ray.runtime.commands.matrix_records import Record, matrices_of
from mpi_workers.wire.commands import COMMANDS, Rerun
from mpi_workers.wire.frames import Body
from mpi_workers.wire.names import SAVE_STATE


def written(libraries: LoadedLibraries, body: Body) -> list[int]:
    """The matrices that a command is declared to change in place."""
    match body:
        case {"op": "run", "uses": uses} if not body.get("pure"):
            return list(uses)
        case {"op": "resize", "matrices": matrices}:
            return list(matrices)  # the old ranks end: nothing must be read from them
        case {"op": "call", "library": library, "routine": routine, "arguments": arguments}:
            given = [arguments.get(name) for name in libraries.writes(library, routine)]
            return [value["matrix"] for value in given if isinstance(value, dict)]
    return []


def changed(libraries: LoadedLibraries, body: Body) -> list[int]:
    """The matrices that a command may change: all that it gets, where nothing is declared."""
    if body["op"] == "call" and not libraries.declares(body["library"], body["routine"]):
        return matrices_of(body)
    return written(libraries, body)


def affected(
    libraries: LoadedLibraries, matrices: Mapping[int, Record], body: Body, used: list[Record]
) -> tuple[list[Record], list[Record]]:
    """The inputs of a command, and its changes: matrices, their aliases, a library's state."""
    idents = changed(libraries, body) if used else []
    found = [matrices[ident] for ident in idents]
    shared = set[int]().union(*(record.aliases for record in found)) - set(idents)
    found += filter(None, map(matrices.get, sorted(shared)))
    library, routine = body.get("library", ""), body.get("routine", "")
    state = libraries.state(library)
    if state is None:
        return used, found
    if routine != SAVE_STATE and not libraries.pure(library, routine):
        found.append(state)
    return [*used, state], found


def repeatable(libraries: LoadedLibraries, body: Body) -> bool:
    """Whether a command that was lost with a rank can be run again: it has no other effects."""
    match COMMANDS[body["op"]].rerun, body:
        case Rerun.IF_PURE, {"library": library, "routine": routine}:
            return libraries.pure(library, routine)
        case Rerun.IF_PURE, _:
            return bool(body.get("pure"))
        case rerun, _:
            return rerun is Rerun.ALWAYS
