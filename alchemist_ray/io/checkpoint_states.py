"""States of libraries in checkpoints: what `save_state` returns, and `load_state` takes."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.libraries import Library
from alchemist_ray.gang.matrix_ref import MatrixRef
from mpi_workers.wire.frames import Body
from mpi_workers.wire.library_names import LOAD_STATE, SAVE_STATE


@dataclass(frozen=True, slots=True)
class LibraryState:
    """The state of a library as it was saved.

    Attributes
    ----------
    library, path : str
        Its name, and its file, if it was loaded from one.
    version : int
        Tells whether it has been changed since, as the version of a matrix does.
    arguments : dict
        Of `load_state`: values and handles.
    """

    library: str
    path: str | None
    version: int
    arguments: dict[str, Any]

    def for_gang(self) -> list[Any]:
        """It as the GroupManager takes it, with the ids of matrices."""
        arguments = {
            name: {"matrix": value.id} if isinstance(value, MatrixRef) else value
            for name, value in self.arguments.items()
        }
        return [self.library, self.version, arguments]

    def for_manifest(self) -> Body:
        """It as JSON, with the files of matrices."""
        arguments = {name: _to_json(value) for name, value in self.arguments.items()}
        return {"library": self.library, "path": self.path, "arguments": arguments}


def save_states(connection: GangConnection) -> list[LibraryState]:
    """Save the states of all libraries that can. Raises the errors of their routines."""
    states = []
    for described in connection.request({"op": "list_libraries"})["libraries"]:
        if "version" not in described:
            continue
        library = Library(connection, described)
        saved = library.routine(SAVE_STATE)()
        save, load = (
            next(fields for fields in described["routines"] if fields["name"] == name)
            for name in (SAVE_STATE, LOAD_STATE)
        )
        values = saved if len(save["results"]) > 1 else [saved]
        names = [parameter[0] for parameter in load["parameters"]]
        arguments = dict(zip(names, values, strict=True))
        states.append(
            LibraryState(library.name, described["path"], described["version"], arguments)
        )
    return states


def arguments_of(entry: Body, matrices: Mapping[str, MatrixRef]) -> dict[str, Any]:
    """The arguments of `load_state` from a manifest, and its matrices by file."""
    return {name: _from_json(value, matrices) for name, value in entry["arguments"].items()}


def files_of(entries: list[Body]) -> set[str]:
    """The files of matrices that belong to states."""
    values = (value for entry in entries for value in entry["arguments"].values())
    return {value["file"] for value in values if isinstance(value, dict) and "file" in value}


def _to_json(value: Any) -> Any:
    match value:
        case MatrixRef():
            return {"file": f"{value.id}.npy"}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case complex():
            return {"complex": [value.real, value.imag]}
        case list():
            return [_to_json(item) for item in value]
    return value


def _from_json(value: Any, matrices: Mapping[str, MatrixRef]) -> Any:
    match value:
        case {"file": file}:
            return matrices[file]
        case {"bytes": text}:
            return base64.b64decode(text)
        case {"complex": parts}:
            return complex(*parts)
        case list():
            return [_from_json(item, matrices) for item in value]
    return value
