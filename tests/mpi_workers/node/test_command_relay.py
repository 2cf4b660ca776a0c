"""Commands go to all ranks of a node, and their replies become one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpi_workers.failures import Failure
from mpi_workers.node.command_relay import CommandRelay
from mpi_workers.node.processes import RankProcess
from mpi_workers.protocol.replies import ERRORS_SENT
from mpi_workers.waits.interruption import InterruptWord
from mpi_workers.wire.frames import Body, Frame, Kind

RANKS = 6
SEQ = 3


class Node:
    """A relay, what it sends to the ranks, and everything that it tells the manager."""

    def __init__(self, folder: Path) -> None:
        self.told: list[Body] = []
        self.sent: list[bytes] = []
        self.word = InterruptWord(folder / "word")
        ranks = {rank: RankProcess(rank) for rank in range(RANKS)}
        for process in ranks.values():
            process.control = self  # type: ignore[assignment]
        self.relay = CommandRelay(0, ranks, self.word, self)
        self.relay.relay({"op": "call", "seq": SEQ}, b"frame")

    def send_encoded(self, data: bytes) -> None:
        self.sent.append(data)

    def send_event(self, op: str, **fields: Any) -> None:
        self.told.append({"event": op, **fields})

    def send_reply(self, body: Body) -> None:
        self.told.append(body)

    def send_output(self, rank: int | None = None) -> None:
        self.told.append({"event": "output", "rank": rank})

    def answer(self, *replies: Body) -> Body:
        """Each rank's reply, the last one from all further ranks too; the node's reply."""
        for rank in range(RANKS):
            body = {"seq": SEQ, **replies[min(rank, len(replies) - 1)]}
            self.relay.receive(rank, Frame(Kind.REPLY, body, 0, ()))
        return self.told[-1]


def error(words: str) -> Body:
    return Failure("RoutineError", words).to_map()


A, B = [7, [2, 2], "float64", "MC_MR"], [7, [2, 3], "float64", "MC_MR"]


@pytest.mark.parametrize(
    ("replies", "combined"),
    [
        ([{}], {}),
        ([{"value": 5, "matrices": [A], "floating": 2}, {"matrices": [A], "floating": 1}],
         {"value": 5, "matrices": [A], "floating": 3}),
        ([{"places": {"recv": [0]}}, {"places": {"recv": [1]}}, {}],
         {"places": {"recv": [0, 1]}}),
        ([{"errors": [error("no")]}], {"errors": [error("no")] * ERRORS_SENT, "failed": RANKS}),
    ],
)  # fmt: skip
def test_the_replies_of_ranks_become_one(
    tmp_path: Path, replies: list[Body], combined: Body
) -> None:
    node = Node(tmp_path)
    assert node.sent == [b"frame"] * RANKS
    assert node.answer(*replies) == {"seq": SEQ, "node": 0, **combined}
    assert node.told[-2] == {"event": "output", "rank": None}  # all lines come before the reply
    assert node.relay.newest is None


def test_a_rank_that_returns_other_matrices_fails_the_call(tmp_path: Path) -> None:
    reply = Node(tmp_path).answer({"matrices": [A]}, {"matrices": [B]}, {"matrices": [A]})
    assert reply["failed"] >= 1
    assert "rank 1 returned matrices of other shapes or layouts" in reply["errors"][0]["message"]


def test_the_first_error_is_reported_at_once_and_ends_the_waits_of_others(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for rank in (4, 2):
        body = {"seq": SEQ, "errors": [error(f"rank {rank}")]}
        node.relay.receive(rank, Frame(Kind.REPLY, body, 0, ()))
    assert node.told == [
        {"event": "output", "rank": 4},
        {"event": "rank_failed", "seq": SEQ, "error": error("rank 4")},
    ]
    assert node.word.ends(SEQ)
    assert not node.word.ends(SEQ + 1)
