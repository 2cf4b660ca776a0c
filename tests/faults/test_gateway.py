"""Clients without Ray, when the gateway or ranks behind it are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster.actors import NAMESPACE, group_name
from alchemist_ray.errors import AlchemistError, GroupRecoveredError
from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.access import TokenFile
from tests.faults.conftest import MATRIX, pid_of, record
from tests.support import traces

AGAIN_LIMIT_S = 45.0  # from the death of the gateway until a client's command is answered
ENDED_LIMIT_S = 20.0


@pytest.fixture(scope="module")
def there(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Address and token of a gateway on a port that stays."""
    folder: Path = tmp_path_factory.mktemp("gateway")
    port = traces.free_port()
    tokens = TokenFile(folder / "tokens.json")
    token = tokens.create("anna", ("call", "run_code"), groups=("cluster",))
    info = actor.serve("127.0.0.1", port, tokens=str(tokens.path), audit=str(folder / "audit.log"))
    yield {"address": info.address, "token": token}
    info.stop()


def gateway_pid() -> int:
    (found,) = (pid for pid, line in traces.processes().items() if "GatewayActor" in line)
    return found


@pytest.mark.cell("gateway", "idle", "gateway", "goes on if named")
def test_a_killed_gateway_starts_again_and_named_gangs_go_on(there: dict[str, str]) -> None:
    with (
        AlchemistSession(2, name="gateway-stays", lifetime="detached", **there) as named,
        AlchemistSession(1, **there) as private,
    ):
        named.send_matrix(MATRIX, name="A").keep()
        rank = private.list_workers()[0].pid
        killed = gateway_pid()
        os.kill(killed, signal.SIGKILL)
        begun = traces.clock()
        assert np.array_equal(named.matrix("A").fetch(), MATRIX)
        spent = traces.clock() - begun
        assert spent < AGAIN_LIMIT_S
        assert gateway_pid() != killed
        with pytest.raises(AlchemistError):
            private.list_matrices()
        ended = traces.wait_until(lambda: not os.path.exists(f"/proc/{rank}"), ENDED_LIMIT_S)
        record("gateway killed: until a client is served", spent, ended, "no error")
        assert ended is not None
        assert np.array_equal(named.send_matrix(MATRIX).fetch(), MATRIX)
    AlchemistSession.stop_gang("gateway-stays")


@pytest.mark.cell("rank", "idle", "gateway", "goes on")
def test_clients_see_that_a_gang_was_started_again(there: dict[str, str]) -> None:
    with AlchemistSession(2, name="gateway-recovers", max_failures=3) as owner:
        owner.send_matrix(MATRIX, name="A").keep()
        with AlchemistSession.attach("gateway-recovers", **there) as thin:
            assert np.array_equal(thin.matrix("A").fetch(), MATRIX)
            old = [worker.pid for worker in owner.list_workers()]
            os.kill(old[-1], signal.SIGKILL)
            answer: list[int] = []

            def answers() -> bool:
                try:
                    answer[:] = thin.run(lambda comm: comm.allgather(os.getpid()))
                except GroupRecoveredError:
                    return False  # it was lost during the call: repeat it
                return True

            assert traces.wait_until(answers, 30.0, 0.2) is not None
            assert len(answer) == 2
            assert old[-1] not in answer
            assert np.array_equal(thin.send_matrix(MATRIX).fetch(), MATRIX)


@pytest.mark.cell("GroupManager", "idle", "gateway", "lost; another of its name can be attached to")
def test_a_lost_gang_with_clients_does_not_hide_the_next_of_its_name(there: dict[str, str]) -> None:
    """The gateway gave new clients the lost gang as long as an old one was attached to it."""
    name = "gateway-again"
    with AlchemistSession(1, name=name, lifetime="detached"):
        old = AlchemistSession.attach(name, **there)
        manager = ray.get_actor(group_name(name), namespace=NAMESPACE)
        os.kill(pid_of(manager), signal.SIGKILL)
        with pytest.raises(AlchemistError):
            [old.list_matrices() for _ in range(1000)]
    with AlchemistSession(1, name=name, lifetime="detached") as als:
        als.send_matrix(MATRIX, name="A")
        with AlchemistSession.attach(name, **there) as new:
            assert np.array_equal(new.matrix("A").fetch(), MATRIX)
        old.close()
        AlchemistSession.stop_gang(name)
