"""The nodes of a gang: one message to each node's proxy, one combined reply from each.

Errors for lost ranks and nodes name the cause that is known, and where ranks were.

Tracks which ranks have checked in, joins PMI barriers, runs rounds, and handles failed ranks and
lost nodes. The work per message grows with the nodes, not with the ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from alchemist_ray.background import in_task, in_time
from alchemist_ray.errors import (
    NEXT_GANG,
    AlchemistError,
    GroupError,
    GroupFailedError,
    LaunchError,
)
from alchemist_ray.runtime.commands.matrix_records import DeadMatrices
from mpi_workers.data.description import NodeAddress
from mpi_workers.deadlines import BLAME_S, STUCK_S
from mpi_workers.failures import Failure
from mpi_workers.node.stacks import by_stack, named
from mpi_workers.protocol.commands import COMMANDS, command_name
from mpi_workers.protocol.proxy_messages import PROXY_EVENTS, Line
from mpi_workers.protocol.replies import Replies
from mpi_workers.wire.asynchronous import FrameProtocol
from mpi_workers.wire.frames import Body, Frame, Kind, encode

FIRST_ERROR_S = 0.25  # time to collect the errors of other ranks after the first one
REPORT_S = 1.0  # time for proxies to report the ranks that did not return, and their stacks
CLEAR_LIMIT_S = 30.0  # for proxies to end their ranks
WAITS_S = 0.5  # time for proxies to report in which MPI calls ranks wait
CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT")
PLACES = 4  # that a message names


def waited(places: dict[str, list[int]]) -> str:
    """Where ranks were when their call was ended: ``. At that time rank 1 was in ...``."""
    known = [(sorted(ranks), place) for place, ranks in places.items() if place]
    lines = [
        f"{named(ranks)} {'was' if len(ranks) == 1 else 'were'} in {place}"
        for ranks, place in sorted(known)[:PLACES]
    ]
    return f". At that time {'; '.join(lines)}" if lines else ""


class Round(Replies):
    """One message to all nodes, and the replies so far.

    Parameters
    ----------
    missing : int
        Nodes that have not replied.
    doing : str
        What the ranks run, for messages.
    collective : bool
        Whether the ranks may meet in MPI.
    stuck_timeout_s : float
        How long ranks may be in it when it has failed or was cancelled.

    Attributes
    ----------
    over : Future
        Done when all nodes have replied, or soon after one has failed or the round was cancelled;
        fails with the error that ended the gang.
    cancelled : Failure or None
        Why the caller no longer waits.
    begun : float
        When it was sent, by `time.monotonic`.
    reported : dict or None
        The first error of a rank, before its node's reply.
    limit : str
        `stuck_timeout_s`, for messages.
    stuck, stacks
        Ranks that have not returned from it, as their proxies report them, and where they are.
    """

    def __init__(self, missing: int, doing: str, collective: bool, stuck_timeout_s: float) -> None:
        super().__init__()
        self.missing = missing
        self.doing = doing
        self.collective = collective
        self.stuck_timeout_s = stuck_timeout_s
        self.limit = f"{stuck_timeout_s:g} s (stuck_timeout_s)"
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cancelled: Failure | None = None
        self.begun = time.monotonic()
        self.reported: Body | None = None
        self.stuck: set[int] = set()
        self.stacks: dict[int, list[str]] = {}
        self._returned = asyncio.Event()

    def described(self) -> Body:
        """A round that is over for its caller, and that ranks are still in, for the catalogue."""
        age_s = time.monotonic() - self.begun
        state = "cancelled, but ranks are still in it"
        if self.cancelled is None:
            state = "failed on a rank, and others are still in it"
        return {"name": self.doing or "a call", "state": state, "caller": "", "age_s": age_s}

    def take(self, reply: Body) -> bool:
        """Add a node's reply; whether it is the last one."""
        self.missing -= 1
        self.add(reply, f"node {reply.get('node')}")
        if self.missing:
            return False
        self.finish()
        self._returned.set()
        return True

    async def returned(self, limit_s: float) -> bool:
        """Wait until all ranks have left the call; whether they have in time."""
        with contextlib.suppress(TimeoutError):
            await in_time(self._returned.wait(), limit_s)
        return self._returned.is_set()

    def _where(self) -> str:
        """A line for each stack; see `by_stack`."""
        stacks = {rank: self.stacks[rank] for rank in self.stuck & self.stacks.keys()}
        return "".join(f"\n{line}" for line in by_stack(stacks))

    def still_running(self, message: str) -> str:
        """Add to the message of a cancelled call that ranks have not returned from it."""
        verb = "is" if len(self.stuck) == 1 else "are"
        return (
            f"{message}; {self._stuck_ranks()} {verb} still in {self.doing or 'it'}; the ranks are "
            f"started again if that lasts {self.limit}{self._where()}"
        )

    def _stuck_ranks(self) -> str:
        return named(sorted(self.stuck)) if self.stuck else "ranks"

    def stuck_error(self, what: str, error: Body) -> GroupError:
        """Ranks did not return from a call that failed or was cancelled."""
        return _end_error(
            GroupFailedError,
            f"a call {what} and {self._stuck_ranks()} did not return within {self.limit}: they are "
            "in native code that computes without MPI (of your own: alchemist_check ends it), or "
            "wait in MPI where that is not interrupted (`alchemist doctor` says whether it is)",
            f". The gang was ended; {NEXT_GANG}{self._where()}",
            rank=min(self.stuck, default=error.get("facts", {}).get("rank")),
            cause="ranks stuck in MPI",
            said=self._where(),
        )

    def drop(self, error: AlchemistError) -> None:
        """Ranks are lost. If the call had failed before, its own error is the first cause."""
        if self.reported is not None and not self.errors:
            self.errors, self.failed = [self.reported], 1
        then = f"\nAfter that {error.facts.get('happened', error.args[0])}"
        if self.cancelled is not None:
            self.cancelled.message += then
        elif self.errors:
            first = self.errors[0]
            self.errors[0] = {**first, "message": first["message"] + then}
        self.finish(None if self.errors or self.cancelled is not None else error)
        self._returned.set()

    def finish(self, error: AlchemistError | None = None) -> None:
        """The caller need not wait any longer. Only the first call counts."""
        if self.over.done():
            return
        if self.places and not self.errors and self.cancelled is None:
            self.cancelled = Failure("CancelledError", "the call was interrupted on every rank")
        if self.cancelled is not None:  # whatever the ranks made of it
            self.cancelled.message += waited(self.places)
            self.errors, self.failed = [self.cancelled.to_map()], 1
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)
            self.over.exception()  # seen: the caller may have been cancelled

    def failure(self) -> Failure | None:
        """The error to show: that of the lowest rank, and how many more failed.

        An error on which the ranks have agreed (a fact) is one error, of the rank that it names.
        """
        if not self.errors:
            return None
        errors = sorted(self.errors, key=lambda e: e.get("facts", {}).get("rank", 0))
        failure = Failure.from_map(errors[0])
        others = max(self.failed, len(errors)) - 1
        same = failure.facts.pop("agreed", False) or failure.kind != "RoutineError"
        if not same and others > 0:  # an argument is wrong on all ranks
            failure.message += f" (and on {others} more rank{'s' if others > 1 else ''})"
        return failure


def _end_error(kind: type[GroupError], happened: str, then: str, **facts: Any) -> GroupError:
    """The error for the end of a gang. `happened` is a fact too: a resize may lose ranks alone."""
    return kind(happened + then, happened=happened, **facts)


def ask_kubernetes(pod: str) -> str:
    """Return a hint for a pod that died without an error of its own; empty outside Kubernetes.

    A memory limit that kills a whole container leaves no process that could report it.
    """
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return ""
    namespace = os.environ.get("RAY_CLUSTER_NAMESPACE", "default")
    return (
        f" `kubectl -n {namespace} describe pod {pod}` shows the cause: OOMKilled means that the "
        "pod exceeded its own memory limit, Evicted that its node ran short of resources."
    )


def recovered_words(
    call: str, losses: int, restored: str, error: AlchemistError, undefined: Sequence[str]
) -> str:
    """Return the message for a call that was lost with ranks which were started again.

    `undefined`: names of the matrices that it may have left half written.
    """
    why = "it is not declared pure: call it again"
    if losses > 1:
        why = f"ranks were lost in {losses} runs of it"
    elif undefined:
        why = f"it may have changed {', '.join(undefined)}, undefined now, in place"
    happened = error.facts.get("happened", error.args[0])
    return (
        f"{call} was interrupted: {happened}. {restored}. The call was not repeated, because {why}"
        f"{error.facts.get('said', '')}"
    )


class NodesOwner(Protocol):
    """The owner of nodes, which they tell what happens to them."""

    def ranks_lost(self, nodes: Nodes, error: AlchemistError) -> None:
        """Ranks are lost, or must be replaced: the nodes can start others, with their memory."""

    def nodes_lost(self, nodes: Nodes, error: AlchemistError) -> None:
        """A node is lost, with the memory of its ranks; all others have been released."""

    def node_leaving(self, nodes: Nodes, error: AlchemistError) -> bool:
        """A node is being taken away; whether the gang moves to others."""

    def refusal(self, nodes: Nodes) -> Failure | None:
        """Why no collective round may begin: the command that runs was cancelled before it."""

    def show_progress(self, seq: int, fraction: float, text: str) -> None:
        """A routine has reported its progress."""

    def show_output(self, seq: int, lines: list[Line]) -> None:
        """Ranks have printed lines."""


class Nodes:
    """The nodes of one incarnation of a gang.

    Parameters
    ----------
    count : int
        Number of proxies.
    size : int
        Number of ranks.
    owner : NodesOwner
    stuck_timeout_s : float
        See `Round`.

    Attributes
    ----------
    stuck_timeout_s : float
        Of the rounds that begin now.
    count : int
    ranks : dict of int to map
        Facts that each rank reported when it checked in.
    node_ids : tuple of str
        Ray's ids of the nodes.
    data : dict of int to NodeAddress
        The data endpoint of each node whose ranks have checked in.
    ready : Future
        Done when all ranks have checked in; fails with the reason if they cannot.
    ended : Future
        Fails with the reason when the ranks are lost.
    lost : AlchemistError or None
        Why the ranks are gone, until others are started.
    last_round : int
        Number of the last round.
    failure : AlchemistError or None
        The reason for the end of the gang.
    absent : set of str
        Libraries of the gang that these ranks have not loaded.
    without_ranks : bool
        Whether no others are being started: `lost` says what to do.
    """

    def __init__(
        self,
        count: int,
        size: int,
        owner: NodesOwner,
        stuck_timeout_s: float = STUCK_S,
    ) -> None:
        self.count = count
        self._size = size
        self._owner = owner
        self.stuck_timeout_s = stuck_timeout_s
        self._proxies: dict[int, FrameProtocol] = {}
        self._hosts: dict[int, str] = {}
        self._rounds: dict[int, Round] = {}
        self.last_round = 0
        self._renew = self._settle = False
        self.dead: DeadMatrices | None = None  # of a gang whose commands these nodes carry out
        self._crashed = False  # a rank has crashed; another one may be the cause
        self._not_cleared: set[int] = set()  # nodes that are ending their ranks
        self._starts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions: dict[int, asyncio.Queue[dict[str, list[int]]]] = {}
        self._asked = 0
        self._pmi_nodes = 0
        self._pmi_puts: dict[str, str] = {}
        self.ranks: dict[int, Body] = {}
        self.node_ids: tuple[str, ...] = ()
        self.data: dict[int, NodeAddress] = {}
        self.absent: set[str] = set()
        self.lost: AlchemistError | None = None
        self.without_ranks = False
        self.failure: AlchemistError | None = None
        self.closed = False
        self._became_idle = asyncio.Event()
        self._new_futures()

    def _new_futures(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.ready: asyncio.Future[None] = loop.create_future()
        self._cleared: asyncio.Future[None] = loop.create_future()

    @property
    def busy(self) -> bool:
        """Whether a round is under way."""
        return bool(self._rounds)

    @property
    def limit(self) -> str:
        """That of the round under way, for messages; see `Round`."""
        return next((under_way.limit for under_way in self._rounds.values()), "")

    def lingering(self) -> Round | None:
        """A round that is over for its caller, and that ranks are still in."""
        return next((r for r in self._rounds.values() if r.over.done()), None)

    def not_connected(self) -> list[int]:
        """Nodes whose proxy has not connected."""
        return [node for node in range(self.count) if node not in self._proxies]

    def not_ready(self) -> list[int]:
        """Nodes whose ranks have not all checked in."""
        return [node for node in range(self.count) if node not in self.data]

    def host(self, node: int) -> str:
        """The name of a node, for messages."""
        return self._hosts.get(node, f"number {node}")

    def joined(self, node: int, proxy: FrameProtocol) -> None:
        """A node's proxy has connected. Raises `Failure` if the node has one."""
        if node in self._proxies or node not in range(self.count):
            raise Failure("LaunchError", f"no proxy is expected for node {node!r}")
        self._proxies[node] = proxy

    def node_ended(self, node: int) -> None:
        """A node's proxy has ended, and its ranks with it."""
        self._proxies.pop(node, None)
        host = self.host(node)
        self.fail(
            _end_error(
                GroupFailedError,
                f"node {host} was lost: its part of the gang was killed, or the network to it was "
                f"cut.{ask_kubernetes(host)}",
                f" The gang was ended on all nodes; {NEXT_GANG}",
                node=node,
                cause="node lost",
            )
        )

    # --- messages from nodes ---

    def receive(self, node: int, frame: Frame) -> None:
        """Handle a frame of a node's proxy."""
        if frame.kind == Kind.REPLY:
            self._reply(frame.body)
        elif frame.kind == Kind.EVENT and (op := frame.body.pop("op")) in PROXY_EVENTS:
            getattr(self, f"_on_{op}")(node, **frame.body)

    def _on_progress(self, node: int, seq: int, fraction: float, text: str) -> None:
        self._owner.show_progress(seq, fraction, text)

    def _on_output(self, node: int, seq: int, lines: list[Line]) -> None:
        self._owner.show_output(seq, lines)

    def _on_ranks_running(
        self, node: int, seq: int, ranks: list[int], stacks: dict[str, list[str]]
    ) -> None:
        if (under_way := self._rounds.get(seq)) is not None:
            under_way.stuck.update(ranks)
            under_way.stacks |= {int(rank): stack for rank, stack in stacks.items()}

    def _on_waits(self, node: int, question: int, waits: dict[str, list[int]]) -> None:
        if (answers := self._questions.get(question)) is not None:
            answers.put_nowait(waits)

    def _on_endpoint_ended(self, node: int, hostname: str, cause: str, pid: int) -> None:
        happened = f"the gang's data endpoint (pid {pid} on {hostname}) {cause}"
        then = f", so the gang was ended on all nodes. {NEXT_GANG}"
        self.fail(self._error(happened, then, cause=cause, hostname=hostname))

    def _on_node_leaving(self, node: int, hostname: str) -> None:
        error = self._error(
            f"node {hostname} is being taken away (SIGTERM): its pod is evicted, drained or "
            "deleted, or its job ends",
            f". The gang was ended on all nodes; {NEXT_GANG} on the remaining nodes",
            node=node,
            cause="node leaving",
            hostname=hostname,
        )
        if not self._owner.node_leaving(self, error):
            self.fail(error)

    def _on_cleared(self, node: int) -> None:
        self._not_cleared.discard(node)
        if not self._not_cleared and not self._cleared.done():
            self._cleared.set_result(None)

    def _error(self, happened: str, then: str, **facts: Any) -> GroupError:
        """The error for a loss; see `_end_error`."""
        kind = GroupFailedError if self.ready.done() else LaunchError
        return _end_error(kind, happened, then, **facts)

    def _on_rank_ended(
        self,
        node: int,
        hostname: str,
        rank: int,
        cause: str,
        pid: int,
        tail: str,
        frames: list[str],
    ) -> None:
        """A rank has ended. If it crashed, wait for another node to report what caused that."""
        # The user code or library routine that the ranks run, if any.
        doing = next((f", in {r.doing}" for r in self._rounds.values() if r.doing), "")
        then = "so the gang was ended on all nodes"
        if not self.ready.done():
            then = "while the gang was starting"
        said = f"\n--- last output of rank {rank} ---\n{tail}" if tail else ""
        if frames:
            said = f"\nit crashed in {' < '.join(frames)}{said}"
        error = self._error(
            f"rank {rank} (pid {pid} on {hostname}) {cause}{doing}",
            f", {then}. {NEXT_GANG}{said}",
            rank=rank,
            cause=cause,
            hostname=hostname,
            tail=tail,
            said=said,
        )
        if self.count > 1 and any(signal in cause for signal in CRASHES):
            self._crashed = True
            asyncio.get_running_loop().call_later(BLAME_S, self.lose, error)
        else:
            self.lose(error)

    def _on_ready(self, node: int, ranks: list[Body], addresses: list[str]) -> None:
        first = min(about["rank"] for about in ranks)
        self.data[node] = NodeAddress(first, len(ranks), tuple(addresses))
        self._hosts[node] = str(ranks[0]["hostname"])
        for about in ranks:
            self.ranks[about["rank"]] = {**about, "node": node}
        if len(self.ranks) == self._size and not self.ready.done():
            self.ready.set_result(None)

    def _on_pmi_barrier(self, node: int, puts: dict[str, str]) -> None:
        self._pmi_puts.update(puts)
        self._pmi_nodes += 1
        if self._pmi_nodes == self.count:
            puts, self._pmi_puts, self._pmi_nodes = self._pmi_puts, {}, 0
            self._tell("pmi_release", puts=puts)

    # --- a call that fails or is cancelled ---

    def _on_rank_failed(self, node: int, seq: int, error: Body) -> None:
        """A rank raised: release the ranks that wait for it in MPI, and answer the caller soon."""
        self._tell("interrupt", but=node, seq=seq, signal=False)
        under_way = self._rounds.get(seq)
        if under_way is not None:
            under_way.reported = under_way.reported or error
        # Ranks of another round do not wait for each other: all of them reply soon.
        if under_way is not None and under_way.collective and not under_way.over.done():
            in_task(self._after_failure(seq, under_way, error), self._tasks)

    def cancel(self, first: int, why: Failure) -> bool:
        """End the current collective round, if its number is at least `first`; False if none is.

        Ranks leave it as if it had failed on another rank, and are signalled as well. Ranks that
        stay in native code have `stuck_timeout_s`.
        """
        for seq, under_way in self._rounds.items():
            if seq >= first and under_way.collective and not under_way.over.done():
                if under_way.cancelled is None:
                    under_way.cancelled = why
                    self._tell("interrupt", seq=seq, signal=True)
                    in_task(self._after_cancelling(seq, under_way, why), self._tasks)
                return True
        return False

    async def _after_failure(self, seq: int, under_way: Round, error: Body) -> None:
        if await under_way.returned(FIRST_ERROR_S) or under_way.over.done():
            return
        message = (
            f"{error['message']} (other ranks have not come back from the call yet: if they are "
            f"stuck in it, the ranks are started again in {under_way.limit})"
        )
        under_way.errors.append({**error, "message": message})
        under_way.failed = max(1, under_way.failed)
        under_way.finish()
        what = f"failed on rank {error.get('facts', {}).get('rank')}"
        await self._end_if_stuck(seq, under_way, what, error)

    async def _after_cancelling(self, seq: int, under_way: Round, why: Failure) -> None:
        if await under_way.returned(FIRST_ERROR_S) or under_way.over.done():
            return
        self._ask_who_runs(seq, under_way)
        if await under_way.returned(REPORT_S):
            return
        why.message = under_way.still_running(why.message)
        under_way.finish()
        await self._end_if_stuck(seq, under_way, "was cancelled", why.to_map())

    async def _end_if_stuck(self, seq: int, under_way: Round, what: str, error: Body) -> None:
        """Replace the ranks if some do not return from a call that failed or was cancelled."""
        if await under_way.returned(under_way.stuck_timeout_s):
            return
        self._ask_who_runs(seq, under_way)
        if not await under_way.returned(REPORT_S):
            self.lose(under_way.stuck_error(what, error))

    def _ask_who_runs(self, seq: int, under_way: Round) -> None:
        under_way.stuck.clear()  # stacks are kept until newer ones arrive
        self._tell("report_running", seq=seq)

    async def waits_in(self) -> dict[str, list[int]]:
        """The ranks that wait in MPI at this moment, by call, of nodes that answer in time."""
        found: dict[str, list[int]] = {}
        self._asked = question = self._asked + 1
        answers: asyncio.Queue[dict[str, list[int]]] = asyncio.Queue()
        self._questions[question] = answers
        self._tell("report_waits", question=question)
        try:
            async with asyncio.timeout(WAITS_S):
                for _ in range(len(self._proxies)):
                    for name, ranks in (await answers.get()).items():
                        found[name] = sorted([*found.get(name, ()), *ranks])
        except TimeoutError:  # a node is slow
            pass
        finally:
            del self._questions[question]
        return found

    def _reply(self, body: Body) -> None:
        under_way = self._rounds.get(body["seq"])
        if under_way is None:
            return
        if under_way.take(body):
            del self._rounds[body["seq"]]
            if not self._rounds:
                self._became_idle.set()
            self._settle = self._settle or under_way.settle
            failed = under_way.failed or under_way.places
            if under_way.renew or (failed and len(under_way.sequences) > 1):
                why = under_way.renew or (
                    "a rank has left out collectives on communicators that later calls may use"
                )
                happened = f"{under_way.doing or 'a call'} has ended, and {why}"
                self.lose(_end_error(GroupFailedError, happened, ""))

    def _tell(self, op: str, *, but: int | None = None, **fields: Any) -> None:
        """Send one of `PROXY_COMMANDS` to all nodes, or to all but one."""
        data = encode(Kind.COMMAND, {"op": op, **fields})
        for node, proxy in self._proxies.items():
            if node != but:
                proxy.send_encoded(data)

    # --- a round over all nodes ---

    async def round(self, op: str, **fields: Any) -> Round:
        """Send one command to every rank and wait for all answers.

        `Proxy._command` (`mpi_workers.node.proxy`) receives it on each node.

        Raises
        ------
        Failure
            If any rank failed, or the round was cancelled: other ranks may still be at it, and the
            next round waits for them. If the command was cancelled before a collective round.
        GroupFailedError
            If the gang is lost.
        """
        await self.idle()
        if self._crashed and self.failure is None:
            await asyncio.wait([self.ended])  # a node has no ranks: its reply would be missing
        if (error := self.failure or self.lost) is not None:
            raise error.with_traceback(None)  # those of earlier ones would pile up
        command = COMMANDS[op]
        if command.collective and (refusal := self._owner.refusal(self)) is not None:
            raise refusal
        self.last_round += 1
        body: Body = {"op": op, "seq": self.last_round, **fields}
        if self.dead is not None:
            body |= self.dead.fields
        if command.collective:
            wanted = {"renew": self._renew, "settle": self._settle}
            body |= {name: True for name, is_wanted in wanted.items() if is_wanted}
            self._renew = self._settle = False
        data = encode(Kind.COMMAND, body)
        if self.dead is not None:
            self.dead.told()
        doing = command_name(body) if command.prints else ""  # code of users and libraries
        under_way = Round(len(self._proxies), doing, command.collective, self.stuck_timeout_s)
        self._rounds[self.last_round] = under_way
        for proxy in self._proxies.values():
            proxy.send_encoded(data)
        await under_way.over
        failure = under_way.failure()
        if failure is not None:
            self._renew = self._renew or command.collective  # the next call: other communicators
            failure.interrupted = bool(
                under_way.places or under_way.missing or under_way.cancelled is not None
            )
            raise failure
        return under_way

    async def idle(self) -> None:
        """Wait until every rank has returned from an earlier call (see `_end_if_stuck`)."""
        while self._rounds and self.failure is None and self.lost is None:
            self._became_idle.clear()
            await self._became_idle.wait()

    # --- other ranks ---

    def lose(self, error: AlchemistError) -> None:
        """Ranks are lost, or must be replaced: callers get the error. The first one counts."""
        if self.failure is not None or self.closed or self.lost is not None:
            return
        starting = not self.ready.done()
        if starting and not self._starts:
            self.fail(error)
            return
        self.lost = error
        self._forget_rounds(error)
        if not starting:  # else `start` raises it
            self._owner.ranks_lost(self, error)

    async def clear(self, matrices: Sequence[int]) -> None:
        """End the ranks on all nodes, after `lose`, and free all memory but that of matrices.

        Raises what ends the gang meanwhile.
        """
        self._not_cleared = set(self._proxies)
        self._cleared = asyncio.get_running_loop().create_future()
        self._tell("clear", matrices=list(matrices))
        try:
            await in_time(asyncio.shield(self._cleared), CLEAR_LIMIT_S)
        except TimeoutError:
            late = ", ".join(map(self.host, sorted(self._not_cleared)))
            words = f"the ranks on {late} could not be ended within {CLEAR_LIMIT_S:g} s"
            self.fail(_end_error(GroupFailedError, words, f". The gang was ended; {NEXT_GANG}"))
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    async def start(self, limit_s: float) -> None:
        """Start ranks on all nodes, after `clear`; they have no matrices and libraries.

        Raises
        ------
        AlchemistError
            They did not check in, or the gang has ended meanwhile.
        """
        self._starts += 1
        self.without_ranks = False
        self.lost, self._crashed, self._renew, self._settle = None, False, False, False
        self._pmi_nodes, self._pmi_puts = 0, {}
        self.ranks.clear()
        self._new_futures()
        kvs_name = f"alchemist_{uuid.uuid4().hex[:20]}"
        self._tell("start", number=self._starts, kvs_name=kvs_name)
        try:
            await in_time(asyncio.shield(self.ready), limit_s)
        except TimeoutError:
            late = ", ".join(str(rank) for rank in range(self._size) if rank not in self.ranks)
            words = f"ranks {late} did not start again within {limit_s:g} s"
            error = _end_error(LaunchError, words, "")
            self.lose(error)
            raise error from None

    def go_without_ranks(self, error: AlchemistError) -> None:
        """They cannot be started again: every round is refused, and says so."""
        happened = error.facts.get("happened", error.args[0])
        self.without_ranks = True
        self.lost = GroupError(
            f"the gang has no ranks, which could not be started again: {happened}. Its matrices "
            "are kept: they can be fetched, and handle.free() returns their memory at once. The "
            "next call tries to start ranks again",
            **{**error.facts, "happened": happened},
        )

    # --- the end ---

    def fail(self, error: AlchemistError) -> None:
        """The gang is lost: callers get the error, and every node is released."""
        if self.failure is not None or self.closed:
            return
        self.failure = error
        self._drop(error)
        self._owner.nodes_lost(self, error)

    def _forget_rounds(self, error: AlchemistError) -> None:
        for future in (self.ready, self._cleared, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: no one may wait for it
        rounds, self._rounds = list(self._rounds.values()), {}
        for under_way in rounds:
            under_way.drop(error)
        self._became_idle.set()

    def _drop(self, error: AlchemistError) -> None:
        self._forget_rounds(error)
        for proxy in list(self._proxies.values()):
            proxy.close()  # its ranks end with it

    async def shutdown(self, timeout_s: float) -> None:
        """End the gang: libraries are closed, then ranks exit."""
        self.closed = True
        self._tell("shutdown")
        deadline = time.monotonic() + timeout_s
        while self._proxies and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    def close(self, error: AlchemistError) -> None:
        """Release every node; callers that still wait get `error`."""
        self.closed = True
        if self.failure is None:
            self.failure = error
        self._drop(error)


def table_of(nodes: Nodes) -> list[Body]:
    """The fields of a `WorkerInfo` for each rank, without its status."""
    return [
        {
            "rank": rank,
            "node_id": nodes.node_ids[about["node"]],
            "hostname": about["hostname"],
            "gpus": about["gpus"],
            "address": nodes.data[about["node"]].addresses[-1],
            "pid": about["pid"],
        }
        for rank, about in sorted(nodes.ranks.items())
    ]
