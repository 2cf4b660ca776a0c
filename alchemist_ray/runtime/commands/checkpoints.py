"""Writes a checkpoint: all matrices of a gang and states of its libraries, as at one moment.

It is one command, so that no other runs in between. The ranks write the files (`ali.files`), and
`session.checkpoints` restores them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

from alchemist_ray.arrays.saving import remove_hidden
from alchemist_ray.background import in_pool
from alchemist_ray.errors import AlchemistError
from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.commands.matrix_records import FILES, Record
from alchemist_ray.runtime.commands.saved_states import SavedState, call_on, save_state
from mpi_workers.failures import Failure
from mpi_workers.protocol.files import CHECKPOINT_FORMAT, CHECKPOINT_VERSION
from mpi_workers.wire.frames import Body


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is written; its matrices can be loaded when it has its final name.

    Attributes
    ----------
    where : str
        The folder.
    token : str
        In its manifest: tells it from an earlier one.
    stamps : dict of Record to str
        States of the files.
    states : list of SavedState
    """

    where: str
    token: str
    stamps: dict[Record, str]
    states: list[SavedState]

    def cut_log(self, commands: Commands) -> None:
        """From now on matrices and states are rebuilt from it."""
        code = commands.libraries.stamp(FILES)

        def keep(record: Record) -> None:
            path = f"{self.where}/{record.id}.npy"
            commands.log.loaded(record, path, self.stamps[record], code)

        commands.cut(self.stamps, keep)
        for state in self.states:
            commands.keep_state(state.library, state.arguments, state.records)
        commands.log.seconds = 0.0

    async def settle(self, commands: Commands) -> None:
        """Ranks were lost while it got its name: use it if it has. Raises as `Nodes.round`."""
        nodes, first = commands.nodes, commands.next_id
        await nodes.round("load", library=FILES, path=None)
        with contextlib.suppress(Failure):  # there is no other one either
            done = await call_on(nodes, first, FILES, "manifest", {"path": self.where})
            if json.loads(done.value[0]).get("token") == self.token:
                self.cut_log(commands)


async def write(commands: Commands, where: str, cut_log: bool) -> None:
    """Write a checkpoint into a folder, which is replaced in one step.

    Raises
    ------
    Failure
        If it cannot be written; an earlier one is unchanged.
    GroupFailedError
        If ranks are lost meanwhile. `Commands.unsettled` is set if the checkpoint may be whole.
    """
    if "://" in where:
        raise Failure("BadArgumentError", f"{where}: a checkpoint is a folder, not a URL")
    token = uuid.uuid4().hex[:12]
    await commands.load({"library": FILES}, "")
    await commands.bring(FILES)

    async def call(routine: str, **arguments: Any) -> Any:
        done = await call_on(commands.nodes, commands.next_id, FILES, routine, arguments)
        return done.value[0] if done.value else None

    states: list[SavedState] = []
    try:
        hidden = await call("begin_folder", path=where, token=token)
        for library in commands.libraries.states():
            states.append(await save_state(commands, library))
        records = [record for record in commands.matrices.values() if record.sealed]
        of_states = [record for state in states for record in state.records]
        stamps = {}
        for record in (*records, *of_states):
            if record not in of_states and record.id not in commands.matrices:
                continue  # released meanwhile: the ranks free it with the next message
            path = f"{hidden}/{record.id}.npy"
            await call("save", A={"matrix": record.id}, path=path)
            stamps[record] = await call("stamp", path=path)
        checkpoint = Checkpoint(where, token, stamps, states)
        if cut_log:
            commands.unsettled = partial(checkpoint.settle, commands)
        await call("end_folder", path=where, token=token, manifest=_manifest(commands, checkpoint))
        commands.unsettled = None
        if cut_log:
            checkpoint.cut_log(commands)
    except AlchemistError:
        await in_pool(remove_hidden, where, token)  # living ranks remove their own
        raise
    except BaseException:
        commands.unsettled = None
        with contextlib.suppress(Failure):
            await call("end_folder", path=where, token=token)
        raise
    finally:
        commands.dead.add(record.id for state in states for record in state.records)


def _manifest(commands: Commands, checkpoint: Checkpoint) -> str:
    entries = [
        {
            "file": f"{record.id}.npy",
            "name": record.name,
            "shape": list(record.shape),
            "dtype": record.dtype,
            "layout": record.layout,
            "source": record.source,
            "columns": record.columns,
        }
        for record in checkpoint.stamps
    ]
    states = [
        {
            "library": state.library,
            "path": (commands.libraries.stamp(state.library) or (None,))[0],
            "arguments": {name: _to_json(value) for name, value in state.arguments.items()},
        }
        for state in checkpoint.states
    ]
    manifest: Body = {
        "format": CHECKPOINT_FORMAT,
        "version": CHECKPOINT_VERSION,
        "token": checkpoint.token,
        "workers": len(commands.nodes.ranks),
        "matrices": entries,
        "states": states,
    }
    return json.dumps(manifest, indent=1, default=repr)


def _to_json(value: Any) -> Any:
    """An argument of `load_state` as JSON, a matrix as its file; see `session.checkpoints`."""
    match value:
        case {"matrix": ident}:
            return {"file": f"{ident}.npy"}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case complex():
            return {"complex": [value.real, value.imag]}
        case list():
            return [_to_json(item) for item in value]
    return value
