"""The node's end of uploads: agents write files for ranks, and read the results of rank 0."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from alchemist_ray.errors import GroupFailedError, ResourceError
from mpi_workers.node.cleanup import folders_of
from mpi_workers.wire import result_file

FILE_NAME = re.compile(r"[a-z]+-[0-9a-f]{32}")  # see `functions.packing.new_name`
INLINE = 64 << 10  # 64 KiB: what is larger goes through the object store, once

Data = bytes | list[Any]  # the bytes, or an ObjectRef of them in a list


def carried(content: bytes) -> Data:
    """Bytes as Ray carries them best: copied into each message, or put into the store once."""
    if len(content) <= INLINE:
        return content
    return [ray.put(np.frombuffer(content, np.uint8))]


def put(gang: str, name: str, data: Data) -> None:
    """Write a file of mode 600 for a gang's ranks on this node.

    Raises
    ------
    GroupFailedError
        If the gang has no ranks here (any more).
    ResourceError
        If there is no room for it.
    """
    content = data if isinstance(data, bytes) else ray.get(data[0])
    folders = list(folders_of(gang))
    if not folders:
        raise GroupFailedError(f"the gang's proxy on {os.uname().nodename} has ended")
    for folder in folders:
        try:
            _write(folder, name, content)
        except OSError as error:
            raise ResourceError(
                f"cannot write {len(content)} bytes to {folder} on {os.uname().nodename}: "
                f"{error.strerror}. Send large arrays with send_matrix"
            ) from error


def all_of(gang: str) -> dict[str, bytes]:
    """The files of users' functions in a gang's folder on this node, by name."""
    found = {}
    for folder in folders_of(gang):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # removed at this moment
                if FILE_NAME.fullmatch(path.name):
                    found[path.name] = path.read_bytes()
    return found


def _write(folder: Path, name: str, content: Any) -> None:
    new = folder / f"{name}.new"
    try:
        with open(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
            file.write(content)
        new.rename(folder / name)  # whole, or not there
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def parts(gang: str, name: str) -> list[NDArray[np.uint8]]:
    """The parts of a result (`mpi_workers.wire.result_file`).

    Raises
    ------
    GroupFailedError
        If it is not there: its gang has ended.
    """
    for folder in folders_of(gang):
        with contextlib.suppress(FileNotFoundError):
            return result_file.read(folder / name)
    raise GroupFailedError(f"the result {name} was lost, because its gang has ended")
