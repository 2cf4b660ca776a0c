"""Gives ranks that the nodes have started again the matrices of those before, and the libraries."""

from __future__ import annotations

from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.recovery.rebuilding import note_stale


async def adopt(commands: Commands) -> None:
    """Have the ranks use the memory of the gang's matrices. No element is moved.

    Libraries are loaded when they are called next.

    Raises
    ------
    AlchemistError, Failure
        If ranks are lost meanwhile.
    """
    nodes, matrices = commands.nodes, commands.matrices
    done = await nodes.round("adopt", matrices=commands.kept())
    nodes.absent = set(commands.libraries)
    if (settle := commands.unsettled) is not None:
        await settle()
        commands.unsettled = None
    for ident in sorted(done.gone & matrices.keys()):
        note_stale(commands, matrices.pop(ident), "a rank did not find its part of it")
