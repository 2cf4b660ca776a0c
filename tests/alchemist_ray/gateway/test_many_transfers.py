"""Many clients that send and fetch at the same time: a hundred in ``make test-long``."""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.gateway.server.transfers import PIECE_NBYTES
from tests.alchemist_ray.gateway.conftest import blocking, thin_environment
from tests.faults.conftest import Call
from tests.faults.test_gateway import gateway_pid
from tests.support import commands
from tests.support.suite import scaled
from tests.support.traces import memory, wait_until

CLIENTS = scaled(12, 100)
STREAMS = 2
LIMIT_S = 150
# Besides its piece, each stream has buffers of TLS, a thread, and connections to the nodes.
GROWTH_NBYTES = CLIENTS * STREAMS * (PIECE_NBYTES + (1 << 20)) + (64 << 20)
ANSWER_LIMIT_S = 30.0  # of a command of another client meanwhile, on a loaded machine
UNFAIR = 3.0  # times the median: the time of the slowest client

PROGRAM = f"from tests.support.thin_clients import main; main('thin-crowd', {CLIENTS})"


class Usage:
    """Private memory, threads and file descriptors of a process."""

    def __init__(self, pid: int) -> None:
        self.nbytes = memory(pid, "RssAnon")
        self.threads = len(os.listdir(f"/proc/{pid}/task"))
        self.fds = len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.timeout(2 * LIMIT_S, func_only=True)
def test_many_clients_transfer_at_once(there: dict[str, Any]) -> None:
    pid = gateway_pid()
    with AlchemistSession(2, name="thin-crowd", lifetime="detached", **there) as als:
        before, most = Usage(pid), 0
        answers: list[float] = []
        clients = Call(
            lambda: commands.python(
                blocking() + PROGRAM, code=0, limit_s=LIMIT_S, env=thin_environment(there)
            )
        )
        while clients.under_way:
            begun = time.monotonic()
            als.connection.ping()
            answers.append(time.monotonic() - begun)
            most = max(most, Usage(pid).nbytes)
            time.sleep(0.1)
        outcome = clients.outcome(0.0)
        assert outcome.error is None, outcome.error
        done = outcome.result
        found = json.loads(done.stdout)
        spent, grown = found["spent"], most - before.nbytes
        print(
            f"clients {min(spent):.1f} to {max(spent):.1f} s, {grown / 1e6:.0f} MB more, answers "
            f"up to {max(answers):.2f} s, median {statistics.median(answers):.3f} s"
        )
        assert found["failed"] == 0, done.stderr[-3000:]
        assert max(spent) < UNFAIR * statistics.median(spent)
        assert max(answers) < ANSWER_LIMIT_S
        assert grown < GROWTH_NBYTES

        def nothing_left() -> bool:
            now = Usage(pid)
            return now.threads <= before.threads + 8 and now.fds <= before.fds + 8

        assert wait_until(nothing_left, 30.0) is not None
        assert als.list_matrices() == []
    AlchemistSession.stop_gang("thin-crowd", **there)
