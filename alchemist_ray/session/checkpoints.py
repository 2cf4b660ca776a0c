"""Checkpoints: all matrices and states of a session in a folder, and a session from such a folder.

`runtime.commands.checkpoints` writes them; the ranks write and read the matrices (`ali.files`).
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

from alchemist_ray.arrays.saving import as_path, renamed
from alchemist_ray.attached.libraries import Library, shipped
from alchemist_ray.attached.matrix_ref import MatrixRef, ref_of
from alchemist_ray.errors import (
    BadArgumentError,
    FileError,
    MatrixError,
    MatrixNotFoundError,
)
from alchemist_ray.session.owner import GangOwner
from mpi_workers.protocol.files import AUTOMATIC, CHECKPOINT_FORMAT, CHECKPOINT_VERSION, MANIFEST
from mpi_workers.protocol.libraries import LOAD_STATE
from mpi_workers.wire.frames import Body

KEPT = ("name", "shape", "dtype", "layout", "source")  # facts of a matrix in the manifest


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


def _arguments(state: Body, matrices: Mapping[str, MatrixRef]) -> dict[str, Any]:
    return {name: _from_json(value, matrices) for name, value in state["arguments"].items()}


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
        told = connection.request({"op": "list_matrices", "names": [name]})["matrices"]
        found = [about for about in told if about["name"] == name]
        if not found:
            names = ", ".join(sorted({about["name"] for about in told})) or "none"
            raise MatrixNotFoundError(f"there is no matrix {name!r}; names of matrices: {names}")
        if len(found) > 1:
            raise MatrixError(
                f"{len(found)} matrices have the name {name!r}: choose one of list_matrices()"
            )
        return connection.handle(found[0])

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
        and provenance. `restore` loads it. All matrices are written as they are between two calls:
        those of other processes wait meanwhile. Automatic checkpoints of a gang with a
        `checkpoint_folder` have a folder of their own, ``checkpoint_folder.automatic``.
        """
        own = self.connection.address.checkpoint_folder
        wanted = own if folder is None else folder
        if wanted is None:
            raise BadArgumentError(
                "checkpoint() needs a folder, or a gang with one: AlchemistSession(..., "
                "checkpoint_folder='/shared/folder')"
            )
        where = as_path(wanted)
        self.connection.request({"op": "checkpoint", "path": where, "cut": where == own})

    def _check_started(self) -> None:
        """Refuse a checkpoint folder that not all nodes see. Raises `FileError`."""
        folder = self.connection.address.checkpoint_folder
        if folder is not None:
            files = shipped(self.connection, "files")
            files.routine("check_folder")(folder, uuid.uuid4().hex[:12])

    @classmethod
    def restore(
        cls, folder: str | os.PathLike[str], num_workers: int | None = None, **options: Any
    ) -> Self:
        """Create a session with the matrices of a checkpoint, on a gang of any size.

        Libraries whose states were saved are loaded again, with their states.

        Parameters
        ----------
        folder : path_like
            As given to `checkpoint`; or the `checkpoint_folder` of a gang, whose automatic
            checkpoint (``folder.automatic``) is restored if there is no other.
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
        if not os.path.exists(where) and os.path.exists(where + AUTOMATIC):
            where += AUTOMATIC
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
            library = shipped(connection, "files")
            manifest = _checked(library.routine("manifest")(where), where)
            states = manifest.get("states", [])  # none in manifests of earlier versions
            arguments = [value for state in states for value in state["arguments"].values()]
            files_of_states = {value.get("file") for value in arguments if isinstance(value, dict)}
            of_states = {}
            for entry in manifest["matrices"]:
                file, layout = f"{where}/{entry['file']}", entry["layout"]
                handle = ref_of(library.routine("load")(file, layout=layout)[0])
                assert handle is not None
                if [*handle.shape, handle.dtype.name] != [*entry["shape"], entry["dtype"]]:
                    raise FileError(
                        f"{file} does not match the manifest: the checkpoint is damaged, restore "
                        "another one",
                        path=file,
                    )
                if entry["file"] in files_of_states:
                    of_states[entry["file"]] = handle
                    continue
                source = {"kind": "restored", "from": where, "was": entry["source"]}
                columns = entry.get("columns", ())  # likewise
                renamed(connection, handle, entry["name"], source, pin=True, columns=columns)
            for entry in states:
                asked = {"op": "load", "library": entry["library"], "path": entry["path"]}
                loaded = Library(connection, connection.request(asked))
                loaded.routine(LOAD_STATE)(**_arguments(entry, of_states))
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
    elif version > CHECKPOINT_VERSION:
        raise FileError(
            f"{where} has checkpoint format {version}; this version of Alchemist reads "
            f"{CHECKPOINT_VERSION}",
            path=where,
        )
    if not whole:
        raise FileError(f"{where} is not a checkpoint, or its {MANIFEST} is damaged", path=where)
    return cast("dict[str, Any]", manifest)
