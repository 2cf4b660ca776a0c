"""A matrix goes from gang to gang, and either gang, the link or the user breaks it.

Neither gang may keep half a matrix, the other gang goes on, and the error names the gang that was
lost. After the loss of a rank of either the copy goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster.actors import NAMESPACE
from alchemist_ray.errors import (
    AlchemistError,
    GroupFailedError,
    GroupRecoveredError,
    TransferError,
)
from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.access import TokenFile
from alchemist_ray.transfer import gang_copies
from tests.faults.conftest import (
    ERROR_LIMIT_S,
    Gang,
    inject_during,
    kill,
    needs_hosts,
    pid_of,
    record,
    variables,
)
from tests.faults.hosts import Hosts
from tests.faults.test_transfers import halfway, outcome_of, tall
from tests.support import traces

__all__ = ["tall"]  # a fixture


def on_hosts(test: Any) -> Any:
    for mark in needs_hosts(150):
        test = mark(test)
    return test


INSIDE = "tests.faults.inside"
SMALL_JOB = 1 << 20  # 1 MiB: some hundreds of them are one matrix
LINK_S = 10.0  # a cut link is noticed within


@pytest.fixture
def other() -> Iterator[Gang]:
    """A second gang of 2 ranks, which is broken or goes on."""
    gang = Gang(2, name="other")  # with a GroupManager of its own
    yield gang
    gang.session.close()


def manager_of(gang: Gang) -> int:
    return pid_of(gang.manager)


VICTIMS: dict[str, Callable[[Gang], int]] = {
    "GroupManager": manager_of,
    "proxy": lambda gang: gang.proxy,
    "data endpoint": lambda gang: gang.endpoint,
}


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_gang_is_lost(
    gang: Gang, other: Gang, tall: Any, monkeypatch: pytest.MonkeyPatch, side: str, victim: str
) -> None:
    source, target = (gang, other) if side == "source" else (other, gang)
    A = source.session.send_matrix(tall)
    known = len(target.session.list_matrices())
    when = halfway(monkeypatch, lambda: kill(VICTIMS[victim](gang)))
    monkeypatch.setattr(gang_copies, "JOB_BYTES", SMALL_JOB)
    outcome = outcome_of(lambda: target.session.send_matrix(A), when)
    error, fault = outcome.error, f"gang to gang: the {side}'s {victim} is killed"
    if side == "source":
        assert isinstance(error, TransferError), repr(error)
        assert f"gang {A.gang}, which has it, was lost or has ended" in str(error)
        assert len(target.session.list_matrices()) == known
        assert target.works()
    else:
        assert isinstance(error, GroupFailedError), repr(error)
        assert np.array_equal(A.fetch(rows=slice(0, 3)), tall[:3])
        assert len(source.session.list_matrices()) == 2
        assert source.works()
    assert outcome.seconds < ERROR_LIMIT_S
    record(fault, outcome.seconds, None, error)
    gang.start()


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_killed_rank_does_not_break_the_copy(
    gang: Gang, other: Gang, tall: Any, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    source, target = (gang, other) if side == "source" else (other, gang)
    A = source.session.send_matrix(tall)
    when = halfway(monkeypatch, lambda: kill(gang.ranks[1]))
    monkeypatch.setattr(gang_copies, "JOB_BYTES", SMALL_JOB)
    outcome = outcome_of(lambda: target.session.send_matrix(A), when)
    assert outcome.error is None, repr(outcome.error)
    assert np.array_equal(outcome.result.fetch(), tall)
    gang.goes_on(f"gang to gang: a rank of the {side} is killed", outcome.seconds)
    assert other.works()


def test_ctrl_c(gang: Gang, other: Gang, tall: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, known = gang.session.send_matrix(tall), len(other.session.list_matrices())
    when = halfway(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(gang_copies, "JOB_BYTES", SMALL_JOB)
    with pytest.raises(KeyboardInterrupt) as caught:
        other.session.send_matrix(A)  # in this thread, which gets the signal
    record("gang to gang: Ctrl-C", traces.clock() - when[0], None, caught.value)
    assert len(other.session.list_matrices()) == known
    assert other.works()


# --- through a gateway ---


@pytest.fixture(scope="module")
def there(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Address and token of a gateway that copies small parts."""
    folder: Path = tmp_path_factory.mktemp("gateway")
    tokens = TokenFile(folder / "tokens.json")
    token = tokens.create("anna", ("call", "run_code"), groups=("cluster",))
    info = actor.serve("127.0.0.1", 0, tokens=str(tokens.path), audit=str(folder / "audit.log"))
    (name,) = (n["name"] for n in ray.util.list_named_actors(all_namespaces=True)
               if n["namespace"] == NAMESPACE and "gateway" in n["name"])  # fmt: skip
    with variables(ray.get_actor(name, NAMESPACE), gang_copies, JOB_BYTES=SMALL_JOB):
        yield {"address": info.address, "token": token}
    info.stop()


@pytest.fixture
def thin(there: dict[str, str]) -> Iterator[tuple[AlchemistSession, AlchemistSession]]:
    """Two sessions without Ray, of 1 rank each."""
    with AlchemistSession(1, **there) as a, AlchemistSession(1, **there) as b:
        yield a, b


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("victim", ["rank", "proxy"])
def test_a_process_is_killed_behind_a_gateway(
    thin: tuple[AlchemistSession, AlchemistSession], tall: Any, victim: str, side: str
) -> None:
    a, b = thin
    A = a.send_matrix(tall)
    rank = (a if side == "source" else b).list_workers()[0].pid
    pid = rank if victim == "rank" else traces.parent_of(rank)
    outcome = inject_during(lambda: kill(pid), lambda: b.send_matrix(A))
    error = outcome.error
    if victim == "rank":
        assert error is None, repr(error)
        assert np.array_equal(outcome.result.fetch(), tall)
    elif side == "source":
        assert isinstance(error, TransferError), repr(error)
        assert f"gang {A.gang}" in str(error)
        assert not b.list_matrices()
        assert b.run(lambda comm: comm.allreduce(1)) == 1
    else:
        assert isinstance(error, GroupFailedError), repr(error)
        assert np.array_equal(A.fetch(rows=slice(0, 3)), tall[:3])
    record(
        f"gang to gang through a gateway: the {side}'s {victim} is killed",
        outcome.seconds, None, "-" if error is None else error,
    )  # fmt: skip


def test_ctrl_c_behind_a_gateway(
    thin: tuple[AlchemistSession, AlchemistSession], tall: Any
) -> None:
    a, b = thin
    A, when = a.send_matrix(tall), [0.0]

    def cause() -> None:
        when[0] = traces.clock()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.3, cause)
    timer.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        b.send_matrix(A)
    record("gang to gang through a gateway: Ctrl-C", traces.clock() - when[0], None, caught.value)
    assert not b.list_matrices()
    assert b.run(lambda comm: comm.allreduce(1)) == 1


# --- rebuilt after a lost node ---


def test_the_copy_is_made_again_from_the_other_gang(gang: Gang) -> None:
    x = np.random.default_rng(4).random((400, 30))
    A = gang.session.send_matrix(x)
    with AlchemistSession(2, max_failures=3) as als, contextlib.ExitStack() as slow:
        B = als.send_matrix(A, layout="MC_MR")
        C = B + 1
        C.fetch()
        # The GroupManager asks both gangs, also the one that it starts again, if they live.
        slow.enter_context(variables(als._gangs._own.actor, gang_copies, WATCH_S=0.0))
        lose_node(als)
        np.testing.assert_array_equal(fetched(B), x)
        np.testing.assert_array_equal(fetched(C), x + 1)
        gang.session.run(lambda comm, matrix: matrix.local.__iadd__(1) is None, A)
        lose_node(als)
        with pytest.raises(AlchemistError, match=f"was sent from {A.name} of gang.*was changed"):
            fetched(B)
        assert als.run(lambda comm: comm.allreduce(1)) == 2


def lose_node(als: AlchemistSession) -> None:
    """Kill the proxy of a gang's node, and wait until the gang has other ranks."""
    before = {worker.pid for worker in als.list_workers()}
    kill(traces.parent_of(min(before)))
    assert traces.wait_until(lambda: not before & {w.pid for w in als.list_workers()}, 20)


def fetched(handle: Any) -> Any:
    """The elements, when the gang is there again."""
    while True:
        try:
            return handle.fetch()
        except GroupRecoveredError:
            continue


# --- between hosts ---


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts, with a gang on each, and the user's program on the first."""
    with Hosts(2) as two:
        two.start_ray([2, 2], store_bytes=400_000_000)
        near = two[0]
        assert near.call(f"{INSIDE}:join", 2, limit_s=40) == 2
        yield two


@on_hosts
@pytest.mark.parametrize("far", ["source", "target"])
def test_the_link_is_cut(hosts: Hosts, far: str) -> None:
    near = hosts[0]
    one, two = (near.call(f"{INSIDE}:request", name, 2, limit_s=60) for name in ("one", "two"))
    on_far = "one" if one[0]["host"] == hosts[1].name else "two"
    assert {worker["host"] for worker in (*one, *two)} == {hosts[0].name, hosts[1].name}
    on_near = "two" if on_far == "one" else "one"
    source, target = (on_far, on_near) if far == "source" else (on_near, on_far)
    near.call(f"{INSIDE}:keep_large", source, limit_s=60)
    near.begin(f"{INSIDE}:until_broken", source, target)
    time.sleep(1.0)
    start = traces.clock()
    hosts[1].cut()
    try:
        outcome = near.result(LINK_S + 15)
        seconds = outcome["at"] - start
        wanted = "TransferError" if far == "source" else "GroupFailedError"
        assert outcome["kind"] == wanted, outcome
        assert seconds < LINK_S
        if far == "source":
            assert "which has it, was lost" in outcome["message"]
        assert near.call(f"{INSIDE}:total", on_near) == 1
        assert outcome["left"] == (1 if far == "target" else 0)
        record(f"gang to gang, 2 hosts: the link to the {far} is cut", seconds, None, wanted)
    finally:
        hosts[1].mend()
        for name in ("one", "two"):
            near.call(f"{INSIDE}:close", name, limit_s=40)
