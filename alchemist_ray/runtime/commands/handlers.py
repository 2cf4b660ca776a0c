"""The commands of a gang: what an attached process can ask for, and what the gang holds.

`mpi_workers.protocol.commands` declares each command; its handler here has the same name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from alchemist_ray.runtime.commands.loaded_libraries import LoadedLibraries, same, stamp_of
from alchemist_ray.runtime.commands.matrix_records import (
    NOT_KEPT,
    CommandLog,
    DeadMatrices,
    Record,
    sent,
)
from alchemist_ray.runtime.commands.nodes import Nodes, table_of
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import check_layout, stored_shape
from mpi_workers.matrix.sizes import check_room
from mpi_workers.protocol.commands import COMMANDS, command_name, matrices_of
from mpi_workers.protocol.libraries import ARRAYS, LOAD_STATE, SAVE_STATE
from mpi_workers.protocol.packing import places
from mpi_workers.wire.frames import Body

Work = Callable[[], Awaitable[Any]]  # what the gang itself does in a turn among the commands

NO_HOLDER = ""  # of commands that come through Ray: their results are pinned
# Errors of bad input, which the library of expressions finds before it changes a matrix.
REFUSALS = ("BadArgumentError", "BadIndexError", "DtypeError", "ShapeError")


@dataclass(eq=False)
class Commands:
    """The commands of a gang, over all its incarnations.

    Attributes
    ----------
    nodes : Nodes
        Carry them out; those of the next incarnation after a failure.
    soon : callable(op, work)
        Has work of the gang done before all commands that wait.
    users : callable(holders)
        Descriptions of the other programs among these holders.
    write_checkpoint : callable(commands, folder, cut_log)
    log : CommandLog
    stale : dict of int to str
        Matrices that were lost with ranks and could not be rebuilt, and why.
    next_id : int
        The id that the next matrix gets.
    dead : DeadMatrices
    unsettled : callable() or None
        Ranks were lost while a checkpoint replaced the one before: looks which of them is there.
    quota_nbytes : int or None
        Bytes that all matrices may have at the moment: what the other gangs of the user leave of
        the limit of the cluster.
    sends : dict of str to Record
        By the tokens of their senders: a command of a send that comes again makes nothing more.

    Notes
    -----
    Each handler takes the caller's fields and the id of the process that holds the results.
    """

    nodes: Nodes
    soon: Callable[[str, Work], None]
    users: Callable[[set[str]], list[str]]
    log: CommandLog
    write_checkpoint: Callable[[Commands, str, bool], Awaitable[None]]
    stale: dict[int, str] = field(default_factory=dict)
    next_id: int = 1
    matrices: dict[int, Record] = field(default_factory=dict)
    libraries: LoadedLibraries = field(init=False)
    dead: DeadMatrices = field(init=False)
    unsettled: Callable[[], Awaitable[None]] | None = None
    quota_nbytes: int | None = None
    sends: WeakValueDictionary[str, Record] = field(default_factory=WeakValueDictionary)

    def __post_init__(self) -> None:
        self.libraries = LoadedLibraries(self.users)
        self.dead = DeadMatrices(lambda: self.soon("free", self._free))

    # --- matrices ---

    async def create(self, body: Body, holder: str) -> Body:
        """Memory for a matrix that is sent next. It has no name until it is sealed."""
        record = self.sends.get(body["send"])
        if record is None or record.id not in self.matrices:
            source = {"kind": "sent", **body.get("source", {})}
            becomes = body.get("becomes", "")
            record = await self._make("create", body, body, source, holder)
            record.sealed = False
            record.becomes = becomes and check_layout(becomes)
            record.columns = body.get("columns", [])
            self.sends[body["send"]] = record
        return {"matrix": record.id}

    async def seal(self, body: Body, holder: str) -> Body:
        """A matrix has arrived: ranks check that every element is there, and make its copies."""
        record = self._known(body["matrix"])
        if self.sends.get(body["send"]) is not record:
            raise Failure("MatrixError", f"{record.name} is not of this send")
        if record.sealed:  # the answer was lost
            return record.described()
        if not record.copied:
            await self.nodes.round("seal", matrix=record.id)
        if record.becomes:  # in two steps, each of which can be repeated after it was broken off
            if not record.copied:
                await self._copy(record.id, -record.id, record.becomes)
                record.copied = True
            await self._copy(-record.id, record.id, record.becomes)  # the same memory
            self.dead.add([-record.id])
        data, record.kept = record.kept, None
        reason = NOT_KEPT if data is None else ""
        self.log.add(sent(record), made=[record], source=data, reason=reason)
        if record.becomes:
            record.layout, record.becomes = record.becomes, ""
            again = {"op": "redistribute", "source": record.id, "layout": record.layout}
            self.log.add(again, [record], [record])
        record.sealed = True
        if name := body.get("name"):
            record.name, record.pinned = name, True
        return record.described()

    async def free(self, body: Body, holder: str) -> Body:
        """Free matrices, unless other programs use them."""
        known = self._there(body)
        for record in known:
            if found := self.users(record.holders - {holder}):
                raise Failure(
                    "MatrixError",
                    f"{record.name} was not freed: {', '.join(found)} still uses it. Free it after "
                    "that program drops its handles or detaches",
                )
        self.drop(*(record.id for record in known))
        if known:
            await self._free()
        return {"freed": len(known)}

    async def _free(self) -> None:
        """Have the memory of dead matrices freed."""
        if self.nodes.without_ranks:
            self.dead.told()
            await self.nodes.clear(self.kept())
        else:
            await self.nodes.round("free")

    def kept(self) -> list[int]:
        """The matrices that ranks have: also copies that take the place of a matrix soon."""
        copies = [-ident for ident, record in self.matrices.items() if record.becomes]
        return [*self.matrices, *copies]

    def drop(self, *idents: int) -> None:
        """Forget matrices, and free them soon; also if only some ranks have them."""
        copies = [-i for i in idents if i in self.matrices and self.matrices[i].becomes]
        for ident in idents:
            self.matrices.pop(ident, None)
        self.dead.add([*idents, *copies])

    async def _copy(self, source: int, matrix: int, layout: str) -> None:
        await self.nodes.round("redistribute", source=source, matrix=matrix, layout=layout)

    async def redistribute(self, body: Body, holder: str) -> Body:
        """A copy of a matrix in another layout."""
        begin = time.monotonic()
        source = self._known(body["source"])
        source.check_defined()
        fields = {"shape": list(source.shape), "dtype": source.dtype, "layout": body["layout"]}
        origin = {"kind": "layout", "of": source.id}
        record = await self._make("redistribute", body, fields, origin, holder, source=source.id)
        record.columns = source.columns
        if source.layout == record.layout:
            record.shares_with(source)
        again = {"op": "redistribute", "source": source.id, "layout": body["layout"]}
        self.log.add(again, [source], [record], seconds=time.monotonic() - begin)
        return record.described()

    async def _make(
        self, op: str, body: Body, about: Body, origin: Body, holder: str, **more: Any
    ) -> Record:
        """Have the ranks make one matrix for a command; they check that its memory is there."""
        fields = {key: about[key] for key in ("shape", "dtype", "layout")}
        check_layout(fields["layout"])  # a proxy that gets another one refuses the gang
        nbytes = math.prod(stored_shape(fields["shape"])) * np.dtype(fields["dtype"]).itemsize
        check_room(nbytes, self._room(body))
        ident, self.next_id = self.next_id, self.next_id + 1
        try:
            await self.nodes.round(op, matrix=ident, **fields, **more)
        except Failure:
            self.drop(ident)
            raise
        return self._record(ident, body.get("name"), fields, origin, holder)

    def _room(self, body: Body) -> int | None:
        """Bytes that the results of a command may have; None: no limit."""
        limits = [n for n in (self.quota_nbytes, body.get("quota_nbytes")) if n is not None]
        return min(limits) - self.nbytes if limits else None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(record.nbytes for record in self.matrices.values())

    # --- code ---

    async def load(self, body: Body, holder: str) -> Body:
        """Load a library on every rank, or on none; one that is loaded is returned."""
        name, path = body["library"], body.get("path")
        stamp = await stamp_of(path)
        known = self.libraries.in_use(name, stamp, holder, replace=bool(body.get("reload")))
        if known is not None:
            return known
        done = await self.nodes.round("load", library=name, path=path)
        described: Body = done.value
        self.libraries.add(name, stamp, described, holder)
        self.nodes.absent.discard(name)
        if (state := self.libraries.state(name)) is not None:  # commands before had another one
            again = {"op": "load", "library": name, "path": path}
            self.log.add(again, changed=[state], code=stamp)
        return described

    async def call(self, body: Body, holder: str) -> Body:
        """Call a routine of a library."""
        library, routine, arguments = body["library"], body["routine"], body["arguments"]
        self.libraries.check(library, holder)
        await self.bring(library)
        used = [self._known(ident) for ident in matrices_of(body)]
        written = set(self.libraries.written(body) or ())
        for record in used:
            if record.id not in written:  # a routine that writes it may make it whole
                record.check_defined()
        about = {"library": library, "routine": routine, "arguments": arguments}
        again, origin = {"op": "call", **about}, {"kind": "routine", **about}
        done, described = await self._logged(body, again, used, origin, holder)
        results = self.libraries[library].routines[routine]["results"]
        return {
            "names": [name for name, _ in results],
            "values": [
                {**value, "matrix": described.pop(0)} if isinstance(value, dict) else value
                for value in done.value or []
            ],
            **({"floating": done.floating} if done.floating else {}),
        }

    async def run(self, body: Body, holder: str) -> Body:
        """Run a user's function, script or program."""
        task = body["task"]
        used = [self._known(ident) for ident in body["uses"]]
        for record in used:
            record.check_defined()
        origin = {"kind": "run", "name": task["name"], "uses": body["uses"]}
        again = {**task, "op": "run", "uses": body["uses"], "pure": bool(body.get("pure"))}
        done, made = await self._logged(body, again, used, origin, holder)
        value = done.value
        if "sizes" in value:  # too large for a reply: a vector on rank 0, which the caller fetches
            words = -(-places(value["sizes"])[-1].stop // 8)
            fields = {"shape": [words], "dtype": "int64", "layout": "CIRC_CIRC"}
            try:
                kept = await self._make("keep_result", body, fields, origin, holder)
            except Failure:
                self.release({"matrices": [about["matrix"] for about in made]}, holder)
                raise
            value["matrix"] = kept.described()
        return {"value": value, "matrices": made}

    async def _logged(
        self, body: Body, again: Body, used: list[Record], origin: Body, holder: str
    ) -> tuple[Any, list[Body]]:
        """Run foreign code, and log in `again` what it has made and may have changed.

        If it fails, what some ranks made of it is freed.
        """
        changed: list[Record] = []
        if self.log.enabled:
            used, changed = self._affected(again, used)
        room = self._room(body)
        asked = {**again, "changes": self.libraries.changed(again)}
        if room is not None:
            asked["room"] = room
        if "channels" in body:
            asked["channels"] = body["channels"]
        begin = time.monotonic()
        first = self.next_id
        try:
            done = await self.nodes.round(first=first, **asked)
        except Failure as failure:
            self.dead.add_results(first)
            if failure.interrupted:
                self._set_undefined(
                    again,
                    f"is undefined: {command_name(again)} was interrupted while it changed it in "
                    "place. Send or compute it again, or call a routine that overwrites it",
                )
            if again.get("library") != ARRAYS or failure.kind not in REFUSALS:
                words = "a call that failed may have changed it in place"
                self.log.add(again, changed=changed, reason=words)
            raise
        self._set_undefined(again, "")
        described = self._keep_results(done.matrices, origin, holder, body.get("columns"))
        made = [self.matrices[about["matrix"]] for about in described]
        code = self.libraries.stamp(again.get("library", ""))
        seconds = time.monotonic() - begin
        self.log.add(again, used, made, changed, code=code, seconds=seconds)
        return done, described

    def _set_undefined(self, body: Body, why: str) -> None:
        """Note it of the matrices that a routine declares to write; empty: it has written them."""
        if self.libraries.written(body) is not None:
            for record in self.changed(body):
                record.undefined = f"matrix {record.name} {why}" if why else ""

    def leave_undefined(self, body: Body) -> list[Record]:
        """A command was lost with ranks: the matrices that it may have half changed."""
        if COMMANDS[body["op"]].internal:
            return []
        changed = self.changed(body)
        for record in changed:
            record.undefined = record.undefined or (
                f"matrix {record.name} is undefined: ranks were lost during "
                f"{command_name(body)}, which may have changed it in place. Send or compute it "
                "again, or call a routine that overwrites it"
            )
        return changed

    async def bring(self, library: str) -> None:
        """Load a library of the gang on ranks that were started again. Raises `Failure`."""
        if library not in self.nodes.absent:
            return
        path, _ = stamp = self.libraries[library].stamp
        if not same(await stamp_of(path), stamp):
            self.nodes.absent.discard(library)
            words = f"library {library!r} must be loaded again: {path} has changed since then, and"
            self.libraries.remove(library, f"{words} the ranks were started again")
            self.libraries.check(library, "")
        await self.nodes.round("load", library=library, path=path)
        self.nodes.absent.discard(library)

    def changed(self, body: Body) -> list[Record]:
        """The matrices that a command may change, with those that have the same memory."""
        found = [self.matrices[i] for i in self.libraries.changed(body) if i in self.matrices]
        idents = set[int]().union(*({record.id, *record.aliases} for record in found))
        return [self.matrices[ident] for ident in sorted(idents) if ident in self.matrices]

    def _affected(self, body: Body, used: list[Record]) -> tuple[list[Record], list[Record]]:
        """The inputs of a command, and its changes: matrices, their aliases, a library's state."""
        found = self.changed(body)
        state = self.libraries.state(body.get("library", ""))
        if state is None:
            return used, found
        if body["routine"] != SAVE_STATE and not self.libraries.pure(body):
            found.append(state)
        return [*used, state], found

    async def checkpoint(self, body: Body, holder: str) -> Body:
        """Write all matrices and states into a folder; how long that took.

        `cut`: they are rebuilt from there after a loss of ranks.
        """
        begin = time.monotonic()
        await self.write_checkpoint(self, str(body["path"]), bool(body.get("cut")))
        return {"seconds": time.monotonic() - begin}

    # --- what is held ---

    def _known(self, ident: Any) -> Record:
        record = self.matrices.get(ident)
        if record is None:
            if ident in self.stale:
                raise Failure("StaleHandleError", self.stale[ident])
            raise Failure(
                "MatrixNotFoundError",
                f"this gang has no matrix {ident}: it was freed, or never existed",
            )
        return record

    def _record(
        self, ident: int, name: str | None, fields: Body, source: Body, holder: str
    ) -> Record:
        record = Record(
            ident,
            name or f"matrix{ident}",
            tuple(fields["shape"]),
            fields["dtype"],
            fields["layout"],
            source=source,
            holders={holder} - {NO_HOLDER},
            pinned=name is not None or holder == NO_HOLDER,
        )
        self.matrices[ident] = record
        return record

    def _keep_results(
        self, matrices: list[Any] | None, origin: Body, holder: str, columns: Any = None
    ) -> list[Body]:
        """Records of results; `columns` are the names of the columns of the first one."""
        described: list[Body] = []
        for ident, shape, dtype, layout, *alias in matrices or ():
            fields = {"shape": shape, "dtype": dtype, "layout": layout}
            record = self._record(ident, None, fields, origin, holder)
            if columns and not described:
                record.columns = columns
            self.next_id = ident + 1
            for other in filter(None, map(self.matrices.get, alias)):
                record.shares_with(other)
            described.append(record.described())
        return described

    def unlisted(self, matrices: list[Any] | None) -> list[Record]:
        """Records of matrices that ranks have made for the GroupManager: no process gets them."""
        made = self._keep_results(matrices, {"kind": "state"}, NO_HOLDER)
        return [self.matrices.pop(about["matrix"]) for about in made]

    def lost(self, holder: str) -> None:
        """A process is gone, and its leases with it, also those of its `.remote` results."""
        held = set[str]().union(*(record.holders for record in self.matrices.values()))
        for gone in (holder, *(token for token in held if token.startswith(f"{holder}/"))):
            self._release(self.matrices.values(), gone)
        self.libraries.lost(holder)

    def _release(self, records: Iterable[Record], holder: str) -> None:
        for record in list(records):
            record.holders.discard(holder)
            if not record.holders and not record.pinned:
                self.drop(record.id)

    def sharing(self, record: Record) -> list[Record]:
        """The other matrices that have the memory of one: a change of one changes all."""
        about = record.shape, record.dtype, record.layout
        found = [self.matrices[i] for i in record.aliases - {record.id} if i in self.matrices]
        return [one for one in found if (one.shape, one.dtype, one.layout) == about]

    # --- answered at once, also while a command runs ---

    def release(self, body: Body, holder: str) -> Body:
        """A process no longer refers to matrices; those that no process refers to are freed."""
        self._release(self._there(body), holder)
        return {}

    def being_sent(self, holder: str | None = None) -> list[Record]:
        """Matrices that have not arrived, of one process or all."""
        return [
            record
            for record in self.matrices.values()
            if not record.sealed and holder in (None, *record.holders)
        ]

    def _there(self, body: Body) -> list[Record]:
        return [self.matrices[ident] for ident in body["matrices"] if ident in self.matrices]

    def hold(self, body: Body, holder: str) -> Body:
        """A process refers to matrices."""
        for record in self._there(body):
            record.holders |= {holder} - {NO_HOLDER}
        return {}

    def pin(self, body: Body, holder: str) -> Body:
        """Matrices stay until they are freed by name: `Handle.keep`, and pickled handles."""
        for record in self._there(body):
            record.pinned = True
        return {}

    def list_matrices(self, body: Body, holder: str) -> Body:
        """All matrices; the caller holds those with the names that it gives, or all."""
        records = [record for record in self.matrices.values() if record.sealed]
        names = body.get("names")
        held = [record.id for record in records if names is None or record.name in names]
        self.hold({"matrices": held}, holder)
        return {"matrices": [record.described() for record in records]}

    def describe(self, body: Body, holder: str) -> Body:
        """A matrix, which gets a name, and origin and columns where they are known better."""
        record = self._known(body["matrix"])
        record.name = str(body.get("name", record.name))
        record.pinned = record.pinned or body.get("pin", False)
        record.source = body.get("source", record.source)
        record.columns = body.get("columns", record.columns)
        return record.described()

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
        """The gang lives. Whether a command runs; if asked, where each rank runs."""
        ranks = {"workers": table_of(self.nodes)} if body.get("workers") else {}
        return {"busy": self.nodes.busy, **ranks}

    def cut(self, records: Iterable[Record], keep: Callable[[Record], None]) -> None:
        """The commands that led to matrices are forgotten: `keep` logs where each is kept."""
        kept: set[Record] = set()
        for record in records:
            owner = next((other for other in self.sharing(record) if other in kept), None)
            if owner is not None:
                self.log.shared(record, owner)
            else:
                keep(record)
                kept.add(record)

    def keep_state(self, library: str, arguments: Body, records: Iterable[Record]) -> None:
        """Log the arguments of a library's `load_state`, not the calls that led to its state."""
        again = {"op": "call", "library": library, "routine": LOAD_STATE, "arguments": arguments}
        if (state := self.libraries.state(library)) is not None:
            state.made_by = None
            self.log.add(again, records, changed=[state], code=self.libraries.stamp(library))

    def file_stamp(self, body: Body, holder: str) -> Body:
        """The state of the file that a matrix was loaded from."""
        self.log.stamp(self._known(body["matrix"]), str(body["stamp"]))
        return {}
