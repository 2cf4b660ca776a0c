"""Calls that wait for a gang hold up no other call of a gateway, and one user's are limited."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import ResourceError
from alchemist_ray.gateway import secure_socket
from alchemist_ray.gateway.protocol import GatewayAddress
from alchemist_ray.gateway.server.access import TokenFile
from alchemist_ray.gateway.server.actor import GatewayInfo
from mpi_workers.wire.frames import Kind, encode
from tests.faults.conftest import pid_of
from tests.security.test_gateway import SESSION
from tests.support import traces

WAITS = 74
ANSWER_S = 10.0
START_S = 60.0


def names() -> list[str]:
    return [gang.name for gang in AlchemistSession.list()]


def test_clients_that_wait_for_a_gang_hold_up_no_other(gateway: GatewayInfo, token: str) -> None:
    address = GatewayAddress.parse(gateway.address)
    with ThreadPoolExecutor(1) as pool:
        with AlchemistSession(1):  # until it ends, there are not 8 CPUs
            late = pool.submit(AlchemistSession, 8, name="late", start_timeout_s=START_S)
            assert traces.wait_until(lambda: "late" in names(), START_S, 0.05) is not None
            waiting, _ = secure_socket.connect(address, token, SESSION)
            attach = {"op": "attach_gang", "name": "late", "timeout_s": START_S}
            for number in range(WAITS):
                waiting.write(encode(Kind.COMMAND, {"id": number, **attach}))
            time.sleep(0.5)
            start = traces.clock()
            listed = AlchemistSession.list(address=gateway.address, token=token)
            assert traces.clock() - start < ANSWER_S
            assert "starting" in [gang.state for gang in listed if gang.name == "late"]
        with late.result(START_S), waiting:
            answers = [waiting.expect(Kind.REPLY, START_S).body for _ in range(WAITS)]
            assert sorted(answer["id"] for answer in answers) == list(range(WAITS))
            assert {answer["result"]["gang"] for answer in answers} == {"late"}


def test_a_gang_that_hangs_holds_up_no_start_of_another(
    gateway: GatewayInfo, tokens: TokenFile
) -> None:
    there = {"address": gateway.address, "token": tokens.create("hanna", gangs=3)}
    with (
        AlchemistSession(1, **there, name="hangs", lifetime="detached"),
        AlchemistSession.attach("hangs") as inside,
    ):
        pid = pid_of(inside.connection.transport.manager.actor)
    time.sleep(0.5)  # the gateway notes that no client uses it
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(AlchemistSession, 1, **there)
            with (
                started.result(ANSWER_S),
                AlchemistSession(1, **there),
                pytest.raises(ResourceError, match="4 gangs"),
            ):
                AlchemistSession(1, **there)  # it counts: it has not ended
    finally:
        os.kill(pid, signal.SIGCONT)
    AlchemistSession.stop_gang("hangs")
