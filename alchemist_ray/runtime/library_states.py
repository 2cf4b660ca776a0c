"""States of libraries that have the routines `save_state` and `load_state`, as they are moved.

The results of the first routine are the arguments of the second: values and matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alchemist_ray.runtime.commands import Commands
from alchemist_ray.runtime.matrix_records import Record
from alchemist_ray.runtime.nodes import Nodes
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body
from mpi_workers.wire.library_names import LOAD_STATE, SAVE_STATE


@dataclass(frozen=True, slots=True)
class SavedState:
    """The results of a library's `save_state`.

    Attributes
    ----------
    arguments : dict
        Of `load_state`; of a matrix, its id.
    records : list of Record
        The matrices, which no process has: free them.
    """

    library: str
    arguments: Body
    records: list[Record]


async def save_state(commands: Commands, library: str) -> SavedState:
    """Have the ranks save the state of a library. Raises as `Nodes.round`."""
    nodes = commands.nodes
    try:
        done = await _call(nodes, library, SAVE_STATE, {}, commands.next_id)
    except Failure:
        await nodes.round("discard", first=commands.next_id)
        raise
    records = commands.unlisted(done.matrices)
    left = iter(records)
    values = [
        {"matrix": next(left).id} if isinstance(value, dict) else value
        for value in done.value or []
    ]
    routines = commands.libraries[library]["routines"]
    wanted = next(fields for fields in routines if fields["name"] == LOAD_STATE)
    names = [parameter[0] for parameter in wanted["parameters"]]
    return SavedState(library, dict(zip(names, values, strict=True)), records)


async def load_state(nodes: Nodes, saved: SavedState, next_id: int) -> None:
    """Load it, on ranks that have its matrices. Raises as `Nodes.round`."""
    await _call(nodes, saved.library, LOAD_STATE, saved.arguments, next_id)


async def _call(nodes: Nodes, library: str, routine: str, arguments: Body, first: int) -> Any:
    return await nodes.round(
        "call", collective=True, library=library, routine=routine, arguments=arguments, first=first
    )
