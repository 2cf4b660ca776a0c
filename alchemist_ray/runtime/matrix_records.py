"""Record: a matrix of a gang, as the dispatcher knows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alchemist_ray.runtime.logged_command import LoggedCommand
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body


@dataclass(slots=True)
class Record:
    """A matrix of the gang: its facts, its origin, and which processes refer to it.

    Attributes
    ----------
    sealed : bool
        Whether every element has arrived.
    source : dict
        Provenance.
    holders : set of str
        Ids of the attached processes, and tokens of results under way, that refer to it.
    pinned : bool
        It stays until it is freed by name, whatever holders there are.
    columns : list of str
        Names of the columns, if the data had names.
    kept : object
        While it is being sent: data that can be sent again after a failure, if there are any.
    made_by : LoggedCommand or None
        The last command that made or changed it, on a gang that recovers.
    aliases : set of int
        Matrices with the same memory, itself included.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    sealed: bool
    source: dict[str, Any]
    holders: set[str] = field(default_factory=set)
    pinned: bool = False
    columns: list[str] = field(default_factory=list)
    kept: Any = None
    made_by: LoggedCommand | None = None
    aliases: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix, each element counted once."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def version(self) -> int:
        """Number of the last command that made or changed it; 0: not logged."""
        return self.made_by.number if self.made_by is not None else 0

    def shares_with(self, other: Record) -> None:
        """It has the memory of another matrix: a routine returned its argument."""
        other.aliases.update((other.id, self.id))
        self.aliases = other.aliases

    def described(self) -> Body:
        """The record as it travels: handles are made of it (`gang.matrix_ref`)."""
        return {
            "matrix": self.id,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "layout": self.layout,
            "pinned": self.pinned,
            **({"columns": self.columns} if self.columns else {}),
            **({"version": self.version} if self.version else {}),
        }


def check_unused(
    records: Iterable[Record], holder: str, users: Callable[[set[str]], list[str]]
) -> None:
    """Raise `Failure` if a matrix is used by programs other than the one of `holder`."""
    for record in records:
        if found := users(record.holders - {holder}):
            raise Failure(
                "MatrixError",
                f"{record.name} was not freed: {', '.join(found)} still uses it. Free it after "
                "that program drops its handles or detaches",
            )
