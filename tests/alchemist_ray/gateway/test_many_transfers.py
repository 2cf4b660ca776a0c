"""A hundred clients that send and fetch at the same time."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from pathlib import Path

import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.gateway.server.actor import GatewayInfo
from alchemist_ray.gateway.server.transfers import PIECE_NBYTES
from tests.alchemist_ray.gateway.conftest import blocking, thin_environment
from tests.support import commands
from tests.support.traces import processes, wait_until

CLIENTS = 100
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
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        self.nbytes = 1024 * int(found["RssAnon"].split()[0])
        self.threads = int(found["Threads"])
        self.fds = len(os.listdir(f"/proc/{pid}/fd"))


def gateway_pid() -> int:
    (found,) = (pid for pid, line in processes().items() if "GatewayActor" in line)
    return found


@pytest.mark.timeout(2 * LIMIT_S, func_only=True)
def test_a_hundred_clients_transfer_at_once(gateway: GatewayInfo, token: str) -> None:
    there = {"address": gateway.address, "token": token}
    pid = gateway_pid()
    with AlchemistSession(2, name="thin-crowd", lifetime="detached", **there) as als:
        before, most = Usage(pid), 0
        answers: list[float] = []
        over = threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.wait(0.1):
                begun = time.monotonic()
                als.connection.ping()
                answers.append(time.monotonic() - begun)
                most = max(most, Usage(pid).nbytes)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            done = commands.python(
                blocking() + PROGRAM, limit_s=LIMIT_S, env=thin_environment(gateway, token)
            )
        finally:
            over.set()
            watching.join()
        assert done.returncode == 0, done.stderr[-3000:]
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
