"""What a data endpoint asks of its ranks: each rank is asked by itself, with one time limit."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpi_workers.data import loans
from mpi_workers.data.loans import NodeMemory
from mpi_workers.failures import Failure
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Kind
from tests.support import traces


def answering(rank: Connection) -> None:
    """A rank that has no matrix."""
    while True:
        try:
            rank.recv()
            rank.send(Kind.REFUSED, Failure("MatrixNotFoundError", "no matrix").to_map())
        except Exception:  # the test has ended
            return


def test_a_silent_rank_delays_only_those_who_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans, "STALL_TIMEOUT_S", 2.0)
    memory = NodeMemory(range(4))
    pairs = [socket.socketpair() for _ in range(4)]
    for rank, (here, there) in enumerate(pairs):
        memory.join(rank, Connection(here))
        if rank < 2:
            threading.Thread(target=answering, args=(Connection(there),), daemon=True).start()
    with ThreadPoolExecutor() as pool:
        begun = traces.clock()
        stuck = pool.submit(memory.lend, 1, [3, 1, 2], write=False)
        time.sleep(0.1)
        with pytest.raises(Failure, match="no matrix"):
            memory.lend(1, [0], write=False)
        assert traces.clock() - begun < 1.9
        with pytest.raises(Failure, match="rank 3"):
            stuck.result(10)
        assert traces.clock() - begun < 3.5  # not 2 s for each silent rank
    for pair in pairs:
        for end in pair:
            end.close()
