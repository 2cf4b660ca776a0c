"""What a gang can be told to do, as rounds over its nodes; and what it holds.

Matrices with their provenance, libraries, and the files of users' functions that lie
in its folders. The dispatcher sees to it that one command runs at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from alchemist_ray.errors import AlchemistError, to_failure
from alchemist_ray.runtime.nodes import Nodes, Round, worst
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body


@dataclass(slots=True)
class Record:
    """A matrix of the gang: what it is and where it came from."""

    id: int
    name: str
    shape: tuple[int, int]
    dtype: str
    layout: str
    sealed: bool
    source: dict[str, Any]

    def described(self) -> Body:
        """The record as it travels: handles are made of it (`gang.matrix_ref`)."""
        return {
            "matrix": self.id,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "layout": self.layout,
        }


class Commands:
    """The commands of one incarnation of a gang.

    Parameters
    ----------
    nodes : Nodes
        Who carries them out.
    soon : callable(body)
        Puts a command before all that wait.

    Notes
    -----
    Each takes the client's map and gives the reply's. A command in `QUICK` is answered
    at once, whatever the ranks are doing; one in `CALLS` is a single round, and is begun
    with a callback: no task is made for it; one in `ROUNDS` is awaited.
    """

    def __init__(self, nodes: Nodes, soon: Callable[[Body], None]) -> None:
        self._nodes = nodes
        self._soon = soon
        self._ids = 0
        self.matrices: dict[int, Record] = {}
        self.libraries: dict[str, Body] = {}

    # --- several rounds ---

    async def _create(self, body: Body) -> Body:
        fields = {"shape": body["shape"], "dtype": body["dtype"], "layout": body["layout"]}
        await self._nodes.round("reserve", **fields)
        ident = self._new_id()
        try:
            await self._nodes.round("create", matrix=ident, **fields)
        except Failure:
            await self._nodes.round("free", matrices=[ident])
            raise
        self._record(
            ident, body.get("name"), fields, {"kind": "sent", **body.get("source", {})}, False
        )
        return {"matrix": ident}

    async def _seal(self, body: Body) -> Body:
        record = self._known(body["matrix"])
        await self._nodes.round("seal", matrix=record.id)
        record.sealed = True
        return record.described()

    async def _free(self, body: Body) -> Body:
        known = [ident for ident in body["matrices"] if self.matrices.pop(ident, None)]
        if known:
            await self._nodes.round("free", matrices=known)
        return {"freed": len(known)}

    async def _redistribute(self, body: Body) -> Body:
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
            await self._nodes.round("free", matrices=[ident])
            raise
        origin = {"kind": "layout", "of": source.id}
        record = self._record(ident, body.get("name") or source.name, fields, origin, True)
        return record.described()

    async def _load(self, body: Body) -> Body:
        done = await self._nodes.round(
            "load", collective=True, library=body["library"], path=body.get("path")
        )
        described: Body = done.value
        self.libraries[body["library"]] = described
        return described

    async def _discard(self, body: Body) -> Body:
        """Free what some ranks made in a call that failed on others."""
        await self._nodes.round("discard")
        self._nodes.unstage(body["names"])
        return {}

    # --- one round ---

    def _call(self, body: Body, done: Callable[[Body | Failure], None]) -> None:
        arguments = body["arguments"]
        for value in arguments.values():
            if isinstance(value, dict):
                self._known(value["matrix"])
        origin = {
            "kind": "routine",
            "library": body["library"],
            "routine": body["routine"],
            "arguments": arguments,
        }

        def keep(under_way: Round) -> Body:
            records = self._keep_results(under_way, origin)
            described = iter([record.described() for record in records])
            values = under_way.value or []
            return {
                "values": [
                    {"matrix": next(described)} if isinstance(v, dict) else v for v in values
                ]
            }

        self._nodes.begin(
            self._then(done, keep, []),
            "call",
            collective=True,
            library=body["library"],
            routine=body["routine"],
            arguments=arguments,
            first=self._ids + 1,
        )

    def _run(self, body: Body, done: Callable[[Body | Failure], None]) -> None:
        """A user's function or script. What it uses lies as files in the nodes' folders."""
        task = body["task"]
        for ident in body["uses"]:
            self._known(ident)
        origin = {"kind": "run", "name": task["name"], "uses": body["uses"]}

        def keep(under_way: Round) -> Body:
            records = self._keep_results(under_way, origin)
            return {"value": under_way.value, "matrices": [r.described() for r in records]}

        self._nodes.begin(
            self._then(done, keep, [task["result"]]),
            "run",
            collective=True,
            first=self._ids + 1,
            **task,
        )

    def _then(
        self,
        done: Callable[[Body | Failure], None],
        keep: Callable[[Round], Body],
        names: list[str],
    ) -> Callable[[Round, AlchemistError | None], None]:
        def then(under_way: Round, error: AlchemistError | None) -> None:
            if error is not None:
                done(to_failure(error))
            elif under_way.errors:
                self._nodes.spoiled()
                self._soon({"op": "discard", "names": names})
                done(worst(under_way))
            else:
                done(keep(under_way))

        return then

    def _keep_results(self, under_way: Round, origin: Body) -> list[Record]:
        records = []
        for ident, m, n, dtype, layout in under_way.matrices or ():
            fields = {"shape": [m, n], "dtype": dtype, "layout": layout}
            records.append(self._record(ident, None, fields, origin, True))
            self._ids = ident
        return records

    # --- what is held ---

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids

    def _known(self, ident: Any) -> Record:
        record = self.matrices.get(ident)
        if record is None:
            raise Failure(
                "MatrixNotFoundError",
                f"matrix {ident} is not in this gang (any more): it was freed, or never was",
            )
        return record

    def _record(
        self, ident: int, name: str | None, fields: Body, source: Body, sealed: bool
    ) -> Record:
        m, n = fields["shape"]
        record = Record(
            ident, name or f"matrix{ident}", (m, n), fields["dtype"], fields["layout"], sealed,
            source,
        )  # fmt: skip
        self.matrices[ident] = record
        return record

    # --- answered at once ---

    def _list_matrices(self, body: Body) -> Body:
        return {"matrices": [r.described() for r in self.matrices.values() if r.sealed]}

    def _describe(self, body: Body) -> Body:
        """Another name for a matrix, and where it comes from if that is known better."""
        record = self._known(body["matrix"])
        record.name = str(body["name"])
        record.source = body.get("source", record.source)
        return record.described()

    def _list_libraries(self, body: Body) -> Body:
        return {"libraries": list(self.libraries.values())}

    def _ping(self, body: Body) -> Body:
        """The gang lives; whether a command runs."""
        return {"busy": self._nodes.busy}

    def _sources(self, body: Body) -> Body:
        """Where matrices come from: too long for lists of many matrices."""
        return {"sources": [self._known(ident).source for ident in body["matrices"]]}

    def _release(self, body: Body) -> Body:
        """Remove files that were staged for runs, or that runs have left for their caller."""
        self._nodes.unstage(body["names"])
        return {}


QUICK: dict[str, Callable[[Commands, Body], Body]] = {
    "list_matrices": Commands._list_matrices,
    "describe": Commands._describe,
    "list_libraries": Commands._list_libraries,
    "ping": Commands._ping,
    "sources": Commands._sources,
    "release": Commands._release,
}
CALLS: dict[str, Callable[[Commands, Body, Callable[[Body | Failure], None]], None]] = {
    "call": Commands._call,
    "run": Commands._run,
}
ROUNDS: dict[str, Callable[[Commands, Body], Awaitable[Body]]] = {
    "create": Commands._create,
    "seal": Commands._seal,
    "free": Commands._free,
    "redistribute": Commands._redistribute,
    "load": Commands._load,
    "discard": Commands._discard,
}
