"""Writes a checkpoint: the ranks write the matrices (`ali.files`), this module the manifest."""

from __future__ import annotations

import contextlib
import json
import uuid
from typing import Any

from alchemist_ray.errors import (
    AlchemistError,
    BadArgumentError,
    GroupFailedError,
    GroupRecoveredError,
)
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.io.checkpoint_states import LibraryState, save_states
from alchemist_ray.io.saving import files_library, leaving_nothing
from mpi_workers.wire.file_names import CHECKPOINT_FORMAT

VERSION = 1
KEPT = ("name", "shape", "dtype", "layout", "source")  # facts of a matrix in the manifest


def write_checkpoint(connection: GangConnection, where: str, *, cut_log: bool = False) -> None:
    """Write all matrices and states of libraries of a gang; see `AlchemistSession.checkpoint`.

    `cut_log`: from now on the matrices are rebuilt from the checkpoint after a failure.
    """
    token = uuid.uuid4().hex[:12]
    if "://" in where:
        raise BadArgumentError(f"{where}: a checkpoint is a folder, not a URL")
    library = files_library(connection)
    states = save_states(connection)
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
                "states": [state.for_manifest() for state in states],
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


def _cut_log(
    connection: GangConnection, where: str, told: list[dict[str, Any]], states: list[LibraryState]
) -> None:
    """Have matrices and states rebuilt from a checkpoint, if they have not been changed since."""
    stamp = files_library(connection).routine("stamp")
    saved = []
    for about in told:
        path = f"{where}/{about['matrix']}.npy"
        saved.append([about["matrix"], about.get("version", 0), path, stamp(path)])
    kept = [state.for_gang() for state in states]
    connection.request({"op": "checkpointed", "matrices": saved, "states": kept})
