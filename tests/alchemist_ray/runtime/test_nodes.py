"""The nodes of a gang: which of several losses is named."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from alchemist_ray.errors import AlchemistError
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.commands.matrix_records import FREE_DELAY_S
from alchemist_ray.runtime.commands.nodes import Nodes
from mpi_workers.deadlines import BLAME_S, ENDING, FAILING
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import HEADER, Body, Frame, Kind, decode_body
from tests.alchemist_ray.runtime.owners import NodesOwner, Owner
from tests.support import traces

KILLED, CRASHED = "was killed by signal 9 (SIGKILL)", "was killed by signal 11 (SIGSEGV)"


def ended(rank: int, cause: str) -> Frame:
    body: Body = {"rank": rank, "pid": 1, "hostname": "h", "cause": cause, "tail": "", "frames": []}
    return Frame(Kind.EVENT, {"op": "rank_ended", **body}, 0)


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([(1, 3, CRASHED), (0, 1, KILLED)], 1),
        ([(0, 1, KILLED), (1, 3, CRASHED)], 1),
        ([(1, 3, "was killed by signal 6 (SIGABRT)"), (0, 0, "exited with code 3")], 0),
        ([(1, 3, CRASHED)], 3),
    ],
)
def test_a_crash_that_follows_another_loss_is_not_named(
    events: list[tuple[int, int, str]], named: int
) -> None:
    owner = NodesOwner()
    errors = owner.losses

    async def lose() -> float:
        nodes = Nodes(2, 4, owner)
        nodes.ready.set_result(None)
        begin = traces.clock()
        for node, rank, cause in events:
            nodes.receive(node, ended(rank, cause))
            await asyncio.sleep(0.01)
        while not errors:
            await asyncio.sleep(0.005)
        return traces.clock() - begin

    took = asyncio.run(lose())
    assert [error.rank for error in errors] == [named]
    assert took < BLAME_S + 1.0


class Proxy:
    """The connection to a node's proxy, which answers every command at once.

    `commands` are those that it has got, `answers` the fields of its answers, by command.
    """

    def __init__(self, nodes: Nodes, node: int, **answers: Body) -> None:
        self._reply = lambda body: nodes.receive(node, Frame(Kind.REPLY, body, 0))
        self.commands: list[Body] = []
        self.answers = answers

    def send_encoded(self, data: bytes) -> None:
        self.commands.append(command := decode_body(memoryview(data)[HEADER.size :]))
        answer = {"seq": command["seq"], **self.answers.get(command["op"], {})}
        asyncio.get_running_loop().call_soon(self._reply, answer)

    def close(self) -> None:
        """Nothing to close."""


def test_a_command_right_after_a_crash_is_not_complete_without_the_lost_node() -> None:
    """Its error is told only after `BLAME_S`; a round counted the nodes that were left."""

    async def lose() -> None:
        nodes = Nodes(2, 4, NodesOwner())
        for node in range(2):
            nodes.joined(node, Proxy(nodes, node))  # type: ignore[arg-type]
        await asyncio.wait_for(nodes.round("free"), 5)
        nodes.ready.set_result(None)
        nodes.receive(1, ended(3, CRASHED))
        with pytest.raises(AlchemistError, match="SIGSEGV"):
            await asyncio.wait_for(nodes.round("free"), 5)

    asyncio.run(lose())


def told(proxy: Proxy) -> list[Any]:
    """The matrices that a node was told to free, by command."""
    return [body.get("unreferenced", []) for body in proxy.commands]


def test_every_matrix_without_a_process_is_freed_once() -> None:
    async def free() -> list[Any]:
        dispatcher = Dispatcher(Owner())
        nodes = dispatcher.new_nodes(1, 1)
        nodes.joined(0, proxy := Proxy(nodes, 0))  # type: ignore[arg-type]
        dispatcher.use(nodes)
        dead = dispatcher.commands.dead
        dead.add([1, 2])
        with pytest.raises(TypeError):
            await nodes.round("call", library=object())  # it cannot be sent: nothing is forgotten
        await nodes.round("seal", matrix=9)
        dead.add([3])
        await asyncio.sleep(4 * FREE_DELAY_S)  # no command comes
        dead.add_results(7)
        dead.add([])
        await asyncio.sleep(4 * FREE_DELAY_S)
        assert proxy.commands[-1]["discard"] == 7
        assert not dead
        return told(proxy)

    assert asyncio.run(free()) == [[1, 2], [3], []]


def test_what_a_cancelled_command_has_made_is_freed() -> None:
    async def cancel() -> list[Any]:
        gang = Dispatcher(Owner())
        nodes = gang.new_nodes(1, 1)
        made = {"value": {"sizes": [8]}, "matrices": [[1, [3], "float64", "VC_STAR"]]}
        nodes.joined(0, proxy := Proxy(nodes, 0, run=made))  # type: ignore[arg-type]
        gang.use(nodes)
        asked = asyncio.create_task(gang.submit({"op": "run", "task": {"name": "f"}, "uses": []}))
        async with asyncio.timeout(10):
            while not proxy.commands or proxy.commands[-1]["op"] != "keep_result":
                await asyncio.sleep(0)
        assert gang.cancel_calls() == 1
        with pytest.raises(Failure, match="cancelled"):
            await asked
        await nodes.round("seal", matrix=9)
        return told(proxy)

    assert asyncio.run(cancel()) == [[], [], [1, 2]]


def test_matrices_released_while_others_run_the_commands_are_freed_there() -> None:
    async def free() -> tuple[list[Any], list[Any]]:
        dispatcher = Dispatcher(Owner())
        old, new = dispatcher.new_nodes(1, 1), dispatcher.new_nodes(1, 1)
        old.joined(0, before := Proxy(old, 0))  # type: ignore[arg-type]
        new.joined(0, after := Proxy(new, 0))  # type: ignore[arg-type]
        dispatcher.use(old)
        dispatcher.commands.dead.add([1])
        await new.round("create", matrix=5)  # of a resize
        dispatcher.use(new)
        await new.round("seal", matrix=5)
        return told(before), told(after)

    assert asyncio.run(free()) == ([], [[], [1]])


@pytest.mark.parametrize("chain", [ENDING, FAILING])
def test_a_wait_lasts_longer_than_the_waits_inside_it(chain: tuple[float, ...]) -> None:
    assert all(inner < outer for inner, outer in pairwise(chain))


class Answering(Proxy):
    """A node's proxy whose ranks answer as they are told to."""

    def __init__(self, nodes: Nodes, node: int) -> None:
        super().__init__(nodes, node)
        self._nodes, self._node = nodes, node
        self.answer: Body = {}

    def send(self, kind: Kind, body: Body) -> None:
        self.commands.append(body)

    def send_encoded(self, data: bytes) -> None:
        body = decode_body(memoryview(data)[HEADER.size :])
        self.commands.append(body)
        match body["op"]:
            case "clear":
                self.event(op="cleared")
            case "start":
                ranks = [{"rank": self._node, "hostname": "h"}]
                self.event(op="ready", ranks=ranks, addresses=["unix:x"])
            case _ if "errors" in self.answer:
                self.event(op="rank_failed", seq=body["seq"], error=self.answer["errors"][0])
                self._late = {"seq": body["seq"], **self.answer}
            case _:
                frame = Frame(Kind.REPLY, {"seq": body["seq"], **self.answer}, 0)
                asyncio.get_running_loop().call_soon(self._nodes.receive, self._node, frame)

    def event(self, **fields: Any) -> None:
        frame = Frame(Kind.EVENT, fields, 0)
        asyncio.get_running_loop().call_soon(self._nodes.receive, self._node, frame)


def two_nodes() -> tuple[Nodes, NodesOwner, list[Answering]]:
    """Two nodes with a rank each, which have started."""
    owner = NodesOwner()
    nodes = Nodes(2, 2, owner)
    proxies = [Answering(nodes, node) for node in range(2)]
    for node, proxy in enumerate(proxies):
        nodes.joined(node, proxy)  # type: ignore[arg-type]
        proxy.event(op="ready", ranks=[{"rank": node, "hostname": "h"}], addresses=["unix:x"])
    return nodes, owner, proxies


def test_ranks_are_started_again_on_all_nodes_after_all_have_ended() -> None:
    async def lose() -> None:
        nodes, owner, proxies = two_nodes()
        await nodes.ready
        nodes.receive(1, ended(1, KILLED))
        nodes.receive(0, ended(0, KILLED))  # it follows
        assert [error.rank for error in owner.losses] == [1]
        with pytest.raises(AlchemistError, match="rank 1"):
            await nodes.round("free")
        await nodes.clear([])
        await nodes.start(5)
        assert [[body["op"] for body in proxy.commands] for proxy in proxies] == [
            ["clear", "start"], ["clear", "start"],
        ]  # fmt: skip
        assert await nodes.round("free")
        assert nodes.failure is None

    asyncio.run(lose())


def test_the_first_cause_is_the_error_of_a_call_after_which_a_rank_dies() -> None:
    async def lose() -> str:
        nodes, owner, proxies = two_nodes()
        await nodes.ready
        error = {"kind": "RoutineError", "message": "Unknown command bogus", "facts": {"rank": 1}}
        proxies[1].answer = proxies[0].answer = {"errors": [error]}
        call = asyncio.create_task(nodes.round("call", library="x", routine="y"))
        await asyncio.sleep(0.01)
        nodes.receive(0, ended(0, KILLED))
        with pytest.raises(Failure) as caught:
            await call
        assert [error.rank for error in owner.losses] == [0]
        assert caught.value.kind == "RoutineError"
        return caught.value.message

    first, after = asyncio.run(lose()).split("\n")[:2]
    assert first.startswith("Unknown command bogus")
    assert after == f"After that rank 0 (pid 1 on h) {KILLED}, in x.y"


def test_ranks_that_may_not_go_on_are_replaced_after_their_answer() -> None:
    async def ask() -> None:
        nodes, owner, proxies = two_nodes()
        await nodes.ready
        proxies[1].answer = {"renew": "native code has waited in MPI", "value": 7}
        done = await nodes.round("call", library="x", routine="y")
        assert done.value == 7
        (loss,) = owner.losses
        assert "x.y has ended, and native code has waited in MPI" in str(loss)
        with pytest.raises(AlchemistError, match=r"x\.y"):
            await nodes.round("free")

    asyncio.run(ask())


def test_a_node_that_is_lost_while_it_starts_ranks_again_is_named() -> None:
    async def lose() -> None:
        nodes, *_ = two_nodes()
        await nodes.ready
        nodes.receive(1, ended(1, KILLED))
        await nodes.clear([])
        asyncio.get_running_loop().call_soon(nodes.node_ended, 1)
        with pytest.raises(AlchemistError, match="node h was lost"):
            await nodes.start(5)
        assert nodes.failure is not None

    asyncio.run(lose())
