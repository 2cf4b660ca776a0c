"""Checkpoints: all matrices and states of a session in a folder, and a session from such a folder.

The ranks write and read the matrices (`ali.files`); this module writes and reads the manifest.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, cast

from alchemist_ray.arrays.sparse import PARTS, find_sparse
from alchemist_ray.errors import (
    AlchemistError,
    BadArgumentError,
    FileError,
    GroupFailedError,
    GroupRecoveredError,
    MatrixError,
    MatrixNotFoundError,
)
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.libraries import Library
from alchemist_ray.gang.matrix_ref import MatrixRef
from alchemist_ray.gang.owner import GangOwner
from alchemist_ray.io.saving import as_path, files_library, leaving_nothing, renamed
from mpi_workers.wire.frames import Body
from mpi_workers.wire.names import CHECKPOINT_FORMAT, LOAD_STATE, MANIFEST, SAVE_STATE

VERSION = 1
KEPT = ("name", "shape", "dtype", "layout", "source")  # facts of a matrix in the manifest


def _saved_states(connection: GangConnection) -> list[Body]:
    """Save the states of all libraries that can. Raises the errors of their routines.

    Of each: its name, its file if it was loaded from one, a version, which tells as that of a
    matrix whether the state has been changed since, and the arguments of `load_state`: values and
    handles.
    """
    states = []
    for described in connection.request({"op": "list_libraries"})["libraries"]:
        if "version" not in described:
            continue
        saved = Library(connection, described).routine(SAVE_STATE)()
        routines = {fields["name"]: fields for fields in described["routines"]}
        values = saved if len(routines[SAVE_STATE]["results"]) > 1 else [saved]
        names = [parameter[0] for parameter in routines[LOAD_STATE]["parameters"]]
        about = {"library": described["name"], "path": described["path"]}
        arguments = dict(zip(names, values, strict=True))
        states.append({**about, "version": described["version"], "arguments": arguments})
    return states


def _to_json(value: Any) -> Any:
    """An argument of `load_state` as JSON, a matrix as its file."""
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


def write_checkpoint(connection: GangConnection, where: str, *, cut_log: bool = False) -> None:
    """Write all matrices and states of libraries of a gang; see `AlchemistSession.checkpoint`.

    `cut_log`: from now on the matrices are rebuilt from the checkpoint after a failure.
    """
    token = uuid.uuid4().hex[:12]
    if "://" in where:
        raise BadArgumentError(f"{where}: a checkpoint is a folder, not a URL")
    library = files_library(connection)
    states = _saved_states(connection)
    told = connection.request({"op": "list_matrices"})["matrices"]
    with leaving_nothing(where, token):
        hidden = library.routine("begin_folder")(where, token)
        try:
            entries = []
            for about in told:
                file = f"{about['matrix']}.npy"
                origin = connection.request({"op": "sources", "matrices": [about["matrix"]]})
                about["source"] = origin["sources"][0]
                library.routine("save")(connection.handle(about), f"{hidden}/{file}")
                kept = {key: about[key] for key in KEPT}
                entries.append({"file": file, **kept, "columns": about.get("columns", [])})
            manifest = {
                "format": CHECKPOINT_FORMAT,
                "version": VERSION,
                "workers": connection.address.size,
                "matrices": entries,
                "states": [state | {"arguments": _mapped(_to_json, state)} for state in states],
            }
            text = json.dumps(manifest, indent=1, default=repr)
            library.routine("end_folder")(where, token, text)
        except BaseException as error:
            if not isinstance(error, GroupFailedError):
                with contextlib.suppress(AlchemistError):
                    library.routine("end_folder")(where, token)
            raise
    if cut_log:
        with contextlib.suppress(GroupRecoveredError):  # the log is as good as before
            _cut_log(connection, where, told, states)


def _mapped(convert: Callable[[Any], Any], state: Body) -> dict[str, Any]:
    """The arguments of a state, each converted."""
    return {name: convert(value) for name, value in state["arguments"].items()}


def _cut_log(
    connection: GangConnection, where: str, told: list[dict[str, Any]], states: list[Body]
) -> None:
    """Have matrices and states rebuilt from a checkpoint, if they have not been changed since."""
    stamp = files_library(connection).routine("stamp")
    saved = []
    for about in told:
        path = f"{where}/{about['matrix']}.npy"
        saved.append([about["matrix"], about.get("version", 0), path, stamp(path)])

    def by_id(value: Any) -> Any:
        return {"matrix": value.id} if isinstance(value, MatrixRef) else value

    kept = [[state["library"], state["version"], _mapped(by_id, state)] for state in states]
    connection.request({"op": "checkpointed", "matrices": saved, "states": kept})


class SessionCheckpoints(GangOwner):
    """The methods of `AlchemistSession` for named matrices and checkpoints."""

    def matrix(self, name: str) -> Any:
        """The handle of the matrix with this name; of a sparse one a `SparseHandle`.

        Raises
        ------
        MatrixNotFoundError
            If there is no such matrix.
        MatrixError
            If several matrices have this name.
        """
        connection = self.connection
        # The others are not held: their programs may free them meanwhile.
        parts = [name + end for end in ("", *PARTS)]
        told = connection.request({"op": "list_matrices", "names": parts})["matrices"]
        found = [about for about in told if about["name"] == name]
        if not found:
            names = ", ".join(sorted({about["name"] for about in told})) or "none"
            raise MatrixNotFoundError(f"there is no matrix {name!r}; names of matrices: {names}")
        if len(found) > 1:
            raise MatrixError(
                f"{len(found)} matrices have the name {name!r}: choose one of list_matrices()"
            )
        sparse = find_sparse(connection, told, name)
        return connection.handle(found[0]) if sparse is None else sparse

    def checkpoint(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Write all matrices of the session into a folder that all nodes see.

        States of libraries with `save_state` and `load_state` (`ali.routine`) are written, too.

        Parameters
        ----------
        folder : path_like, optional
            Created. An existing checkpoint is replaced in one step when everything has been
            written. Default: the `checkpoint_folder` of the gang, from which its matrices are
            then rebuilt after a failure.

        Raises
        ------
        FileError
            If it cannot be written, or the folder contains other files. The old checkpoint is
            unchanged.

        Notes
        -----
        The folder has a ``.npy`` file for each matrix, and ``manifest.json`` with names, layouts
        and provenance. `restore` loads it.
        """
        own = self.connection.address.checkpoint_folder
        wanted = own if folder is None else folder
        if wanted is None:
            raise BadArgumentError(
                "checkpoint() needs a folder, or a gang with one: AlchemistSession(..., "
                "checkpoint_folder='/shared/folder')"
            )
        where = as_path(wanted)
        write_checkpoint(self.connection, where, cut_log=where == own)

    def _check_started(self) -> None:
        """Refuse a checkpoint folder that not all nodes see. Raises `FileError`."""
        folder = self.connection.address.checkpoint_folder
        if folder is not None:
            files_library(self.connection).routine("check_folder")(folder, uuid.uuid4().hex[:12])

    @classmethod
    def restore(
        cls, folder: str | os.PathLike[str], num_workers: int | None = None, **options: Any
    ) -> Self:
        """Create a session with the matrices of a checkpoint, on a gang of any size.

        Libraries whose states were saved are loaded again, with their states.

        Parameters
        ----------
        folder : path_like
            As given to `checkpoint`.
        num_workers : int, optional
            Default: the number at the time of the checkpoint.
        **options
            See `AlchemistSession`.

        Returns
        -------
        AlchemistSession
            Its matrices have their old names and layouts: ``session.matrix("A")``.

        Raises
        ------
        FileError
            If it is not a checkpoint, has a later version, or is damaged. The session is
            closed.
        """
        where = as_path(folder)
        if num_workers is None:
            try:
                text = Path(where, MANIFEST).read_text(encoding="utf-8")
            except OSError as error:
                raise FileError(
                    f"{where} cannot be read as a checkpoint here: {error.strerror}", path=where
                ) from None
            num_workers = _checked(text, where)["workers"]
        session = cls(num_workers, **options)
        try:
            connection = session.connection
            library = files_library(connection)
            manifest = _checked(library.routine("manifest")(where), where)
            states = manifest.get("states", [])  # none in manifests of earlier versions
            arguments = [value for state in states for value in state["arguments"].values()]
            of_states = {value.get("file") for value in arguments if isinstance(value, dict)}
            found = {}
            for entry in manifest["matrices"]:
                file, layout = f"{where}/{entry['file']}", entry["layout"]
                handle, _ = library.routine("load")(file, layout=layout)
                if [*handle.shape, handle.dtype.name] != [*entry["shape"], entry["dtype"]]:
                    raise FileError(
                        f"{file} does not match the manifest: the checkpoint is damaged, restore "
                        "another one",
                        path=file,
                    )
                if entry["file"] in of_states:
                    found[entry["file"]] = handle
                    continue
                source = {"kind": "restored", "from": where, "was": entry["source"]}
                columns = entry.get("columns", ())  # likewise
                renamed(connection, handle, entry["name"], source, pin=True, columns=columns)
            for entry in states:
                asked = {"op": "load", "library": entry["library"], "path": entry["path"]}
                loaded = Library(connection, connection.request(asked))
                loaded.routine(LOAD_STATE)(**_mapped(lambda value: _from_json(value, found), entry))
        except BaseException:
            session.close()
            raise
        return session


def _checked(text: str, where: str) -> dict[str, Any]:
    """The manifest, if this version can read it. Raises `FileError`."""
    try:
        manifest = json.loads(text)
        format, version = manifest["format"], manifest["version"]
        whole = isinstance(manifest["workers"], int) and all(
            {"file", *KEPT} <= set(entry) for entry in manifest["matrices"]
        )
    except (ValueError, KeyError, TypeError):
        format, version, whole = None, None, False
    if format != CHECKPOINT_FORMAT or not isinstance(version, int):
        whole = False
    elif version > VERSION:
        raise FileError(
            f"{where} has checkpoint format {version}; this version of Alchemist reads {VERSION}",
            path=where,
        )
    if not whole:
        raise FileError(f"{where} is not a checkpoint, or its {MANIFEST} is damaged", path=where)
    return cast("dict[str, Any]", manifest)
