"""The states of libraries, as their routines `save_state` and `load_state` give and take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.commands.matrix_records import Record
from alchemist_ray.runtime.commands.nodes import Nodes
from mpi_workers.failures import Failure
from mpi_workers.protocol.libraries import LOAD_STATE, SAVE_STATE
from mpi_workers.wire.frames import Body


@dataclass(frozen=True, slots=True)
class SavedState:
    """The results of a library's `save_state`, which are the arguments of its `load_state`.

    Attributes
    ----------
    arguments : dict
        Values; of a matrix, its id.
    records : list of Record
        The matrices, which no process has: free them.
    """

    library: str
    arguments: Body
    records: list[Record]

    async def load(self, nodes: Nodes, next_id: int) -> None:
        """Load it, on ranks that have its matrices. Raises as `Nodes.round`."""
        await call_on(nodes, next_id, self.library, LOAD_STATE, self.arguments)


async def save_state(commands: Commands, library: str) -> SavedState:
    """Have the ranks save the state of a library. Raises as `Nodes.round`."""
    await commands.bring(library)
    try:
        done = await call_on(commands.nodes, commands.next_id, library, SAVE_STATE, {})
    except Failure:
        commands.dead.add_results(commands.next_id)
        raise
    records = commands.unlisted(done.matrices)
    left = iter(records)
    values = [
        {"matrix": next(left).id} if isinstance(value, dict) else value
        for value in done.value or []
    ]
    parameters = commands.libraries[library].routines[LOAD_STATE]["parameters"]
    names = [parameter[0] for parameter in parameters]
    return SavedState(library, dict(zip(names, values, strict=True)), records)


async def call_on(nodes: Nodes, first: int, library: str, routine: str, arguments: Body) -> Any:
    """Call a routine for the GroupManager itself; its matrices have the ids from `first` on."""
    return await nodes.round(
        "call", library=library, routine=routine, arguments=arguments, first=first
    )
