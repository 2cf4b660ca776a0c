"""The commands of a gang: what an attached process can ask for, and what the gang holds.

`COMMANDS` lists every operation with its fields. The dispatcher runs those that are not
`immediate` one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from alchemist_ray.runtime.loaded_libraries import LoadedLibraries, stamp_of
from alchemist_ray.runtime.matrix_records import Record
from alchemist_ray.runtime.nodes import Nodes
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

NO_HOLDER = ""  # of commands that come through Ray: their results are pinned

FREE_DELAY_S = 0.02  # in which the next command may take a free along


class Commands:
    """The commands of one incarnation of a gang.

    Parameters
    ----------
    nodes : Nodes
        Carry them out.
    soon : callable(body)
        Queues a command before all others.
    users : callable(holders)
        Descriptions of the other programs among these holders.

    Notes
    -----
    Each handler takes the caller's fields and the id of the process that holds the results.
    """

    def __init__(
        self,
        nodes: Nodes,
        soon: Callable[[Body], None],
        users: Callable[[set[str]], list[str]],
    ) -> None:
        self._nodes = nodes
        self._soon = soon
        self._users = users
        self._ids = 0
        self.matrices: dict[int, Record] = {}
        self.libraries = LoadedLibraries(users)

    # --- matrices ---

    async def create(self, body: Body, holder: str) -> Body:
        """Memory for a matrix that is sent next."""
        fields = {"shape": body["shape"], "dtype": body["dtype"], "layout": body["layout"]}
        await self._nodes.round("reserve", **fields)
        ident = self._new_id()
        try:
            await self._nodes.round("create", matrix=ident, **fields)
        except Failure:
            self._soon({"op": "free", "matrices": [ident], "forced": True})
            raise
        source = {"kind": "sent", **body.get("source", {})}
        record = self._record(ident, body.get("name"), fields, source, holder, sealed=False)
        record.columns = body.get("columns", [])
        return {"matrix": ident}

    async def seal(self, body: Body, holder: str) -> Body:
        """A matrix has arrived: ranks check that every element is there."""
        record = self._known(body["matrix"])
        await self._nodes.round("seal", matrix=record.id)
        record.sealed = True
        return record.described()

    async def free(self, body: Body, holder: str) -> Body:
        """Free matrices, unless other programs use them."""
        if not body.get("forced"):
            self._check_unused(body["matrices"], holder)
        known = [ident for ident in body["matrices"] if self.matrices.pop(ident, None)]
        if body.get("forced"):
            known = body["matrices"]
        if known:
            await self._nodes.round("free", matrices=known)
        return {"freed": len(known)}

    def _check_unused(self, idents: list[int], holder: str) -> None:
        for record in filter(None, map(self.matrices.get, idents)):
            if users := self._users(record.holders - {holder}):
                raise Failure(
                    "MatrixError",
                    f"{record.name} was not freed: {', '.join(users)} still uses it. Free it after "
                    "that program drops its handles or detaches",
                )

    async def redistribute(self, body: Body, holder: str) -> Body:
        """A copy of a matrix in another layout."""
        source = self._known(body["source"])
        fields = {"shape": list(source.shape), "dtype": source.dtype, "layout": body["layout"]}
        await self._nodes.round("reserve", **fields)
        ident = self._new_id()
        try:
            await self._nodes.round(
                "redistribute",
                collective=True,
                source=source.id,
                matrix=ident,
                layout=body["layout"],
            )
        except Failure:
            self._soon({"op": "free", "matrices": [ident], "forced": True})
            raise
        origin = {"kind": "layout", "of": source.id}
        record = self._record(ident, body.get("name"), fields, origin, holder)
        record.columns = source.columns
        return record.described()

    # --- code ---

    async def load(self, body: Body, holder: str) -> Body:
        """Load a library on every rank, or on none; one that others have loaded is shared."""
        name, path = body["library"], body.get("path")
        stamp = await stamp_of(path)
        if (known := self.libraries.in_use(name, stamp, holder)) is not None:
            return known
        done = await self._nodes.round("load", collective=True, library=name, path=path)
        described: Body = done.value
        self.libraries.add(name, stamp, described, holder)
        return described

    async def call(self, body: Body, holder: str) -> Body:
        """Call a routine of a library."""
        arguments = body["arguments"]
        for value in arguments.values():
            if isinstance(value, dict):
                self._known(value["matrix"])
        library, routine = body["library"], body["routine"]
        done = await self._collective(
            [],
            "call",
            library=library,
            routine=routine,
            arguments=arguments,
            first=self._ids + 1,
        )
        origin = {
            "kind": "routine", "library": library, "routine": routine, "arguments": arguments,
        }  # fmt: skip
        made = self._keep_results(done.matrices, origin, holder, body.get("columns"))
        described = iter(made)
        return {
            "names": self._result_names(library, routine),
            "values": [
                {**value, "matrix": next(described)} if isinstance(value, dict) else value
                for value in done.value or []
            ],
        }

    def _result_names(self, library: str, routine: str) -> list[str]:
        routines = self.libraries[library]["routines"]
        found = next(fields for fields in routines if fields["name"] == routine)
        return [name for name, _ in found["results"]]

    async def run(self, body: Body, holder: str) -> Body:
        """Run a user's function or script, whose files are in the nodes' folders."""
        task = body["task"]
        for ident in body["uses"]:
            self._known(ident)
        done = await self._collective([task["result"]], "run", first=self._ids + 1, **task)
        origin = {"kind": "run", "name": task["name"], "uses": body["uses"]}
        made = self._keep_results(done.matrices, origin, holder)
        return {"value": done.value, "matrices": made}

    async def _collective(self, files: list[str], op: str, **fields: Any) -> Any:
        """A round that runs foreign code. If it fails, what some ranks made of it is freed."""
        try:
            return await self._nodes.round(op, collective=True, **fields)
        except Failure:
            self._soon({"op": "discard", "names": files})
            raise

    async def discard(self, body: Body, holder: str) -> Body:
        """Free the results of the last call on ranks where it succeeded: it failed on others."""
        await self._nodes.round("discard")
        self._nodes.unstage(body["names"])
        return {}

    def written(self, body: Body) -> list[int]:
        """The matrices that a command may change in place."""
        match body:
            case {"op": "run", "uses": uses} if not body.get("pure"):
                return list(uses)
            case {"op": "call", "library": library, "routine": routine, "arguments": arguments}:
                given = [arguments.get(name) for name in self.libraries.writes(library, routine)]
                return [value["matrix"] for value in given if isinstance(value, dict)]
        return []

    # --- what is held ---

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids

    def _known(self, ident: Any) -> Record:
        record = self.matrices.get(ident)
        if record is None:
            raise Failure(
                "MatrixNotFoundError",
                f"this gang has no matrix {ident}: it was freed, or never existed",
            )
        return record

    def _record(
        self,
        ident: int,
        name: str | None,
        fields: Body,
        source: Body,
        holder: str,
        *,
        sealed: bool = True,
    ) -> Record:
        record = Record(
            ident, name or f"matrix{ident}", tuple(fields["shape"]), fields["dtype"],
            fields["layout"], sealed,
            source, pinned=name is not None or holder == NO_HOLDER,
        )  # fmt: skip
        if holder != NO_HOLDER:
            record.holders.add(holder)
        self.matrices[ident] = record
        return record

    def _keep_results(
        self, matrices: list[Any] | None, origin: Body, holder: str, columns: Any = None
    ) -> list[Body]:
        """Records of results; `columns` are the names of the columns of the first one."""
        described: list[Body] = []
        for ident, shape, dtype, layout in matrices or ():
            fields = {"shape": shape, "dtype": dtype, "layout": layout}
            record = self._record(ident, None, fields, origin, holder)
            if columns and not described:
                record.columns = columns
            described.append(record.described())
            self._ids = ident
        return described

    def lost(self, holder: str) -> None:
        """A process is gone, and its leases with it."""
        self._release(self.matrices.values(), holder)
        self.libraries.lost(holder)

    def _release(self, records: Iterable[Record], holder: str) -> None:
        unheld = []
        for record in list(records):
            record.holders.discard(holder)
            if not record.holders and not record.pinned:
                unheld.append(record.id)
                del self.matrices[record.id]
        if unheld:
            if not self._nodes.unreferenced:
                asyncio.get_running_loop().call_later(FREE_DELAY_S, self._free_unreferenced)
            self._nodes.unreferenced += unheld

    def _free_unreferenced(self) -> None:
        """Free matrices, if no command has taken their numbers to the ranks meanwhile."""
        unheld, self._nodes.unreferenced = self._nodes.unreferenced, []
        if unheld:
            self._soon({"op": "free", "matrices": unheld, "forced": True})

    # --- answered at once, also while a command runs ---

    def release(self, body: Body, holder: str) -> Body:
        """A process no longer refers to matrices; those that no process refers to are freed."""
        known = (self.matrices.get(ident) for ident in body["matrices"])
        self._release((record for record in known if record is not None), holder)
        return {}

    def end_lease(self, body: Body, holder: str) -> Body:
        """The result of a `.remote` call is no longer referred to."""
        self.lost(str(body["holder"]))
        return {}

    def hold(self, body: Body, holder: str) -> Body:
        """A process refers to matrices."""
        for ident in body["matrices"]:
            if (record := self.matrices.get(ident)) is not None and holder != NO_HOLDER:
                record.holders.add(holder)
        return {}

    def pin(self, body: Body, holder: str) -> Body:
        """Matrices stay until they are freed by name: `Handle.keep`, and pickled handles."""
        for ident in body["matrices"]:
            if (record := self.matrices.get(ident)) is not None:
                record.pinned = True
        return {}

    def list_matrices(self, body: Body, holder: str) -> Body:
        """All matrices; the caller holds them."""
        records = [record for record in self.matrices.values() if record.sealed]
        self.hold({"matrices": [record.id for record in records]}, holder)
        return {"matrices": [record.described() for record in records]}

    def describe(self, body: Body, holder: str) -> Body:
        """A matrix, which gets a name, and origin and columns where they are known better."""
        record = self._known(body["matrix"])
        record.name = str(body.get("name", record.name))
        record.pinned = record.pinned or body.get("pin", False)
        record.source = body.get("source", record.source)
        record.columns = body.get("columns", record.columns)
        return record.described()

    def touch(self, body: Body, holder: str) -> Body:
        """The gang is used: data goes directly to ranks."""
        return {}

    def resume(self, body: Body, holder: str) -> Body:
        """A process is connected again: these are all matrices that it refers to."""
        now = set(body["matrices"])
        self.hold({"matrices": now}, holder)
        gone = [r for r in self.matrices.values() if holder in r.holders and r.id not in now]
        self._release(gone, holder)
        return {}

    def sources(self, body: Body, holder: str) -> Body:
        """Provenance of matrices."""
        return {"sources": [self._known(ident).source for ident in body["matrices"]]}

    def list_libraries(self, body: Body, holder: str) -> Body:
        """The libraries that are loaded, with their signatures."""
        return {"libraries": self.libraries.described()}

    def ping(self, body: Body, holder: str) -> Body:
        """The gang lives. Whether a command runs."""
        return {"busy": self._nodes.busy}

    def remove_files(self, body: Body, holder: str) -> Body:
        """Remove files that were uploaded for runs, or that runs left for their caller."""
        self._nodes.unstage(body["names"])
        return {}


Queued = Callable[[Commands, Body, str], Awaitable[Body]]
Immediate = Callable[[Commands, Body, str], Body]


class Command(NamedTuple):
    """An operation: its handler, and the fields that a caller gives (``?``: optional).

    Every command also has ``id``, and may have ``timeout_s`` (seconds, with the time in the
    queue) and ``output`` (whether the caller shows what ranks print).
    """

    fields: tuple[str, ...]
    queued: Queued | None = None
    immediate: Immediate | None = None


COMMANDS: dict[str, Command] = {
    "create": Command(
        ("shape", "dtype", "layout", "name?", "source?", "columns?"), Commands.create
    ),
    "seal": Command(("matrix",), Commands.seal),
    "free": Command(("matrices", "forced?"), Commands.free),
    "redistribute": Command(("source", "layout", "name?"), Commands.redistribute),
    "load": Command(("library", "path?"), Commands.load),
    "call": Command(("library", "routine", "arguments", "columns?"), Commands.call),
    "run": Command(("task", "uses", "pure?"), Commands.run),
    "discard": Command(("names",), Commands.discard),
    "release": Command(("matrices",), immediate=Commands.release),
    "end_lease": Command(("holder",), immediate=Commands.end_lease),
    "hold": Command(("matrices",), immediate=Commands.hold),
    "pin": Command(("matrices",), immediate=Commands.pin),
    "list_matrices": Command((), immediate=Commands.list_matrices),
    "describe": Command(
        ("matrix", "name?", "pin?", "source?", "columns?"), immediate=Commands.describe
    ),
    "touch": Command((), immediate=Commands.touch),
    "resume": Command(("matrices",), immediate=Commands.resume),
    "sources": Command(("matrices",), immediate=Commands.sources),
    "list_libraries": Command((), immediate=Commands.list_libraries),
    "ping": Command((), immediate=Commands.ping),
    "remove_files": Command(("names",), immediate=Commands.remove_files),
}


def checked(body: Body) -> Command:
    """The command that a body asks for. Raises `Failure` if it is unknown or lacks fields."""
    op = body.get("op")
    command = COMMANDS.get(op) if isinstance(op, str) else None
    if command is None:
        raise Failure("GroupError", f"unknown command {op!r}")
    missing = [name for name in command.fields if not name.endswith("?") and name not in body]
    if missing:
        raise Failure("GroupError", f"malformed command {op!r}: it needs {', '.join(missing)}")
    return command
