"""Saves a matrix to a file: every rank writes its own part (`ali.files`).

No element passes through the user's process, which need not see the file.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from alchemist_ray.arguments import checked_path
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.libraries import shipped
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.errors import BadArgumentError, GroupFailedError, GroupRecoveredError
from mpi_workers.protocol.files import TABLES


def save(
    ref: MatrixRef, path: str | os.PathLike[str], *, columns: Sequence[str] | None, **options: Any
) -> None:
    """See `Handle.save`, which has the other `options`, too."""
    where = as_path(path)
    token = uuid.uuid4().hex[:12]
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Iterable)):
        raise BadArgumentError(f"columns={columns!r}: it must be a list of names of columns")
    if columns is None and ref.columns and where.rstrip("/").endswith(TABLES):
        columns = ref.columns if len(set(ref.columns)) == len(ref.columns) else None
    with leaving_nothing(where, token):
        shipped(gang_of(ref), "files").routine("save")(
            ref, where, columns=None if columns is None else list(columns), token=token, **options
        )


def renamed(
    connection: GangConnection,
    ref: MatrixRef,
    name: str,
    source: dict[str, Any] | None = None,
    *,
    pin: bool = False,
    columns: Sequence[str] = (),
) -> Any:
    """Give a matrix a name, and optionally another provenance and columns, in the gang's record."""
    fields: dict[str, Any] = {} if source is None else {"source": source}
    if columns:
        fields["columns"] = list(columns)
    return connection.handle(
        connection.request({"op": "describe", "matrix": ref.id, "name": name, "pin": pin, **fields})
    )


def as_path(path: str | os.PathLike[str]) -> str:
    """The path as the ranks get it: absolute, or a URL. Raises `BadArgumentError`."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise BadArgumentError(f"{path!r} is not a path")
    return text if "://" in text else str(checked_path("path", text))


@contextlib.contextmanager
def leaving_nothing(path: str, token: str) -> Iterator[None]:
    """Remove hidden files that a lost gang was writing; living ranks remove their own."""
    try:
        yield
    except (GroupFailedError, GroupRecoveredError):
        remove_hidden(path, token)
        raise


def remove_hidden(path: str, token: str) -> None:
    """Remove what ranks that are lost have written under hidden names; see `ali.files`."""
    whole = Path(os.path.realpath(path))
    for left in glob.glob(f"{glob.escape(str(whole.parent))}/.*.{token}.part*"):
        if os.path.isdir(left):
            shutil.rmtree(left, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(left)
