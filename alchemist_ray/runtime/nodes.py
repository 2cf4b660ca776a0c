"""The nodes of a gang: one message to each node's proxy, one combined reply from each.

Tracks which ranks have checked in, joins PMI barriers, runs rounds, and handles failed ranks and
lost nodes. The work per message grows with the nodes, not with the ranks.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from alchemist_ray.errors import AlchemistError
from alchemist_ray.runtime.failure_causes import (
    endpoint_ended,
    node_leaving,
    node_lost,
    rank_ended,
)
from alchemist_ray.runtime.rounds import Round
from alchemist_ray.runtime.stuck_ranks import StuckRanks
from mpi_workers.data.description import NodeAddress
from mpi_workers.failures import Failure
from mpi_workers.wire.asynchronous import FrameProtocol
from mpi_workers.wire.frames import Body, Frame, Kind, encode

FIRST_ERROR_S = 0.25  # time to collect the errors of other ranks after the first one
DRAIN_S = 30.0  # time for ranks to return from a call that failed on another rank
# MPI crashes in a rank when the one that it talks to is gone: that is known from its node soon.
CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT")
BLAME_S = 0.2
REPORT_S = 1.0  # time for proxies to report the ranks that did not return, and their stacks

T = TypeVar("T")
_numbers = itertools.count(1)


class Nodes:
    """The nodes of one incarnation of a gang.

    Parameters
    ----------
    count : int
        Number of proxies.
    size : int
        Number of ranks.
    on_lost : callable(error)
        Called once when the gang is lost.
    on_progress : callable(body)
        Called with the progress of a routine.
    on_output : callable(body)
        Called with lines that ranks have printed.

    Attributes
    ----------
    number : int
        Of this incarnation among those of this process.
    count : int
    ranks : dict of int to map
        Facts that each rank reported when it checked in.
    node_ids : tuple of str
        Ray's ids of the nodes.
    data : dict of int to NodeAddress
        The data endpoint of each node whose ranks have checked in.
    ready : Future
        Done when all ranks have checked in; fails with the reason if they cannot.
    failure : AlchemistError or None
        The reason for the end of the gang.
    leave : callable(error) -> bool, optional
        Called when a node is being taken away; whether the gang moves to others.
    """

    def __init__(
        self,
        count: int,
        size: int,
        on_lost: Callable[[AlchemistError], None],
        on_progress: Callable[[Body], None],
        on_output: Callable[[Body], None],
    ) -> None:
        self.number = next(_numbers)
        self.count = count
        self._size = size
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._on_output = on_output
        self._proxies: dict[int, FrameProtocol] = {}
        self._rounds: dict[int, Round] = {}
        self._seq = 0
        self._renew = False
        self.leave: Callable[[AlchemistError], bool] | None = None
        self.unreferenced: list[int] = []  # matrices that the next round frees
        self._stuck = StuckRanks()
        self._crashed: set[int] = set()  # nodes with a rank that crashed
        self._pmi_nodes = 0
        self._pmi_puts: dict[str, str] = {}
        self.ranks: dict[int, Body] = {}
        self.node_ids: tuple[str, ...] = ()
        self.data: dict[int, NodeAddress] = {}
        self.failure: AlchemistError | None = None
        self.closed = False
        self._became_idle = asyncio.Event()
        self._ended: asyncio.Future[AlchemistError] = asyncio.get_running_loop().create_future()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def busy(self) -> bool:
        """Whether a round is under way."""
        return bool(self._rounds)

    def left_early(self) -> Round | None:
        """A round that is over for its caller, and that ranks are still in."""
        return next((r for r in self._rounds.values() if r.over.done()), None)

    @property
    def last_round(self) -> int:
        """Number of the last round."""
        return self._seq

    def not_connected(self) -> list[int]:
        """Nodes whose proxy has not connected."""
        return [node for node in range(self.count) if node not in self._proxies]

    def not_ready(self) -> list[int]:
        """Nodes whose ranks have not all checked in."""
        return [node for node in range(self.count) if node not in self.data]

    def host(self, node: int) -> str:
        """The name of a node, for messages."""
        place = self.data.get(node)
        return f"number {node}" if place is None else str(self.ranks[place.first]["hostname"])

    def joined(self, node: int, proxy: FrameProtocol) -> None:
        """A node's proxy has connected. Raises `Failure` if the node has one."""
        if node in self._proxies or node not in range(self.count):
            raise Failure("LaunchError", f"no proxy is expected for node {node!r}")
        self._proxies[node] = proxy

    def left(self, node: int) -> None:
        """A node's proxy has ended, and its ranks with it."""
        self._proxies.pop(node, None)
        if node in self._crashed:
            return  # it has said why
        self.fail(node_lost(node, self.host(node)))

    # --- messages from nodes ---

    def receive(self, node: int, frame: Frame) -> None:
        """Handle a frame of a node's proxy."""
        if frame.kind == Kind.REPLY:
            self._reply(frame.body)
        elif frame.kind == Kind.EVENT:
            self._event(node, frame.body)

    def _event(self, node: int, body: Body) -> None:
        match body["op"]:
            case "progress":
                self._on_progress(body)
            case "output":
                self._on_output(body)
            case "rank_failed":
                self._rank_failed(node, body)
            case "ranks_running":
                self._stuck.add(body)
            case "rank_ended":
                self._rank_ended(node, body)
            case "endpoint_ended":
                self.fail(endpoint_ended(body, starting=not self.ready.done()))
            case "node_leaving":
                error = node_leaving(node, body["hostname"], starting=not self.ready.done())
                if self.leave is None or not self.leave(error):
                    self.fail(error)
            case "pmi_barrier":
                self._pmi_barrier(node, body["puts"])
            case "ready":
                self._node_ready(node, body["ranks"], body["addresses"])

    def _rank_ended(self, node: int, body: Body) -> None:
        """A rank has ended. If it crashed, wait for another node to report what caused that."""
        error = rank_ended(body, self._doing(), starting=not self.ready.done())
        if self.count > 1 and any(signal in body["cause"] for signal in CRASHES):
            self._crashed.add(node)
            asyncio.get_running_loop().call_later(BLAME_S, self.fail, error)
        else:
            self.fail(error)

    def _doing(self) -> str:
        """The user code or library routine that the ranks run, if any."""
        return next((r.doing for r in self._rounds.values() if r.doing), "")

    def _node_ready(self, node: int, ranks: list[Body], addresses: list[str]) -> None:
        first = min(about["rank"] for about in ranks)
        self.data[node] = NodeAddress(first, len(ranks), tuple(addresses))
        for about in ranks:
            self.ranks[about["rank"]] = {**about, "node": node}
        if len(self.ranks) == self._size and not self.ready.done():
            self.ready.set_result(None)

    def _pmi_barrier(self, node: int, puts: dict[str, str]) -> None:
        self._pmi_puts.update(puts)
        self._pmi_nodes += 1
        if self._pmi_nodes == self.count:
            puts, self._pmi_puts, self._pmi_nodes = self._pmi_puts, {}, 0
            self._send_all({"op": "pmi_release", "puts": puts})

    def _rank_failed(self, node: int, body: Body) -> None:
        """A rank raised: release the ranks that wait for it in MPI, and answer the caller soon."""
        seq = body["seq"]
        under_way = self._rounds.get(seq)
        for other, proxy in self._proxies.items():
            if other != node:
                proxy.send(Kind.COMMAND, {"op": "interrupt", "seq": seq})
        if under_way is not None and not under_way.over.done():
            asyncio.get_running_loop().call_later(FIRST_ERROR_S, self._answer_early, seq, body)

    def _answer_early(self, seq: int, body: Body) -> None:
        under_way = self._rounds.get(seq)
        if under_way is not None and not under_way.over.done():
            under_way.errors.append(_with_stuck_ranks(body["error"]))
            under_way.failed = max(1, under_way.failed)
            what = f"failed on rank {body['error'].get('facts', {}).get('rank')}"
            asyncio.get_running_loop().call_later(DRAIN_S, self._give_up, seq, what, body["error"])
            under_way.finish()

    def cancel(self, first: int, why: Failure) -> bool:
        """End the current collective round, if its number is at least `first`; False if none is.

        Ranks leave it as if it had failed on another rank, and are signalled as well. Ranks that
        stay in native code have `DRAIN_S`.
        """
        for seq, under_way in self._rounds.items():
            if seq >= first and under_way.collective and not under_way.over.done():
                if under_way.cancelled is None:
                    under_way.cancelled = why
                    self._send_all({"op": "interrupt", "seq": seq, "signal": True})
                    loop = asyncio.get_running_loop()
                    loop.call_later(FIRST_ERROR_S, self._answer_cancelled, seq, why)
                return True
        return False

    def _answer_cancelled(self, seq: int, why: Failure) -> None:
        under_way = self._rounds.get(seq)
        if under_way is not None and not under_way.over.done():
            self._ask_who_runs(seq)
            loop = asyncio.get_running_loop()
            loop.call_later(REPORT_S, self._answer_stuck, under_way, why)
            loop.call_later(DRAIN_S, self._give_up, seq, "was cancelled", why.to_map())

    def _answer_stuck(self, under_way: Round, why: Failure) -> None:
        why.message = self._stuck.still_running(why.message, under_way.doing, DRAIN_S)
        under_way.finish()

    def unstage(self, names: list[str]) -> None:
        """Remove files from the gang's folders on all nodes."""
        self._send_all({"op": "unstage", "names": [str(name) for name in names]})

    def _ask_who_runs(self, seq: int) -> None:
        self._stuck = StuckRanks()
        self._send_all({"op": "report_running", "seq": seq})

    def _give_up(self, seq: int, what: str, error: Body) -> None:
        """End the gang if ranks have not returned from a call that failed or was cancelled."""

        if seq in self._rounds:
            self._ask_who_runs(seq)
            asyncio.get_running_loop().call_later(REPORT_S, self._fail_stuck, seq, what, error)

    def _fail_stuck(self, seq: int, what: str, error: Body) -> None:
        if seq in self._rounds:
            self.fail(self._stuck.error(what, error, DRAIN_S))

    def _reply(self, body: Body) -> None:
        under_way = self._rounds.get(body["seq"])
        if under_way is None:
            return
        under_way.take(body)
        if under_way.missing == 0:
            del self._rounds[body["seq"]]
            under_way.finish()
            self._note_idle()

    def _send_all(self, body: Body) -> None:
        data = encode(Kind.COMMAND, body)
        for proxy in self._proxies.values():
            proxy.send_encoded(data)

    # --- a round over all nodes ---

    async def round(self, op: str, *, collective: bool = False, **fields: Any) -> Round:
        """Send one command to every rank and wait for all answers.

        Raises
        ------
        Failure
            If any rank failed, or the round was cancelled. Other ranks may still be at it: the
            next round waits for them.
        GroupFailedError
            If the gang is lost.
        """
        await self.idle()
        if self.failure is not None:
            raise self.failure
        self._seq += 1
        body: Body = {"op": op, "seq": self._seq, **fields}
        if self.unreferenced:
            body["unreferenced"], self.unreferenced = self.unreferenced, []
        data = encode(Kind.COMMAND, {**body, "renew": True} if collective and self._renew else body)
        if collective:
            self._renew = False
        under_way = Round(len(self._proxies), _named(op, fields), collective)
        self._rounds[self._seq] = under_way
        for proxy in self._proxies.values():
            proxy.send_encoded(data)
        await under_way.over
        failure = under_way.failure()
        if failure is not None:
            self._renew = self._renew or collective  # the next call gets a fresh communicator
            raise failure
        return under_way

    async def unless_ended(self, work: Awaitable[T]) -> T:
        """The result of work on the nodes. Raises what ends the gang, if that comes first.

        Ray lets calls of an agent wait on a lost node, for its restart.
        """
        task = asyncio.ensure_future(work)
        waits: list[asyncio.Future[Any]] = [task, self._ended]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self._ended.result()
        finally:
            task.cancel()  # also if the caller is cancelled

    async def idle(self) -> None:
        """Wait until every rank has returned from an earlier call (see `_give_up`)."""
        while self._rounds and self.failure is None:
            self._became_idle.clear()
            await self._became_idle.wait()

    def _note_idle(self) -> None:
        if not self._rounds:
            self._became_idle.set()

    # --- the end ---

    def fail(self, error: AlchemistError) -> None:
        """The gang is lost: callers get the error, and every node is released."""
        if self.failure is not None or self.closed:
            return
        self.failure = error
        self._drop(error)
        self._on_lost(error)

    def _drop(self, error: AlchemistError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # retrieved: the launcher may no longer wait
        rounds, self._rounds = list(self._rounds.values()), {}
        for under_way in rounds:
            under_way.finish(error)
        self._became_idle.set()
        if not self._ended.done():
            self._ended.set_result(error)
        for proxy in list(self._proxies.values()):
            proxy.close()  # its ranks end with it

    async def shutdown(self, timeout_s: float) -> None:
        """End the gang: libraries are closed, then ranks exit."""
        self.closed = True
        self._send_all({"op": "shutdown"})
        deadline = time.monotonic() + timeout_s
        while self._proxies and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    def close(self, error: AlchemistError) -> None:
        """Release every node; callers that still wait get `error`."""
        self.closed = True
        if self.failure is None:
            self.failure = error
        self._drop(error)


def _with_stuck_ranks(error: Body) -> Body:
    words = (
        f"{error['message']} (other ranks have not come back from the call yet: if they are stuck "
        f"in it, the gang is ended in {DRAIN_S:.0f} s)"
    )
    return {**error, "message": words}


def _named(op: str, fields: Body) -> str:
    match op:
        case "call":
            return f"{fields['library']}.{fields['routine']}"
        case "load":
            return f"load_library({fields['library']!r})"
        case "run":
            return f"{fields['name']}"
    return ""
