"""The head is lost: gangs on other nodes stay if Ray's control store is in a Redis."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.conftest import HOSTLESS, needs_hosts, record
from tests.faults.hosts import GCS_PORT, Host, Hosts
from tests.support import traces

REDIS = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(not REDIS, reason="no redis-server (apt-get install redis-server)")
pytestmark = needs_hosts(400, HOSTLESS)

REDIS_PORT = 6390
PASSWORD = "of this test"
RANKS = 2
CALLS = 3
GO = "/tmp/go"  # on the host
WITHOUT_HEAD_S = 5  # for which Ray's other nodes wait for the head, here
STARTS, START_S = 3, 50.0
INSIDE = "tests.faults.inside"
OF_RAY = ("gcs_server", "raylet", "dashboard", "ray::", "log_monitor", "monitor.py")


def start_head(host: Host, redis: Host | None = None) -> None:
    """Ray's head without CPUs, whose control store may be in the Redis.

    The first raylet on the address of a lost one can end at once. Kubernetes would start its
    container again; so does this.
    """
    words = [
        "ray", "start", "--head", f"--port={GCS_PORT}", f"--node-ip-address={host.ip}",
        "--num-cpus=0", "--object-store-memory=200000000", "--include-dashboard=false",
        "--disable-usage-stats",
    ]  # fmt: skip
    if redis is not None:
        place = f"RAY_REDIS_ADDRESS={redis.ip}:{REDIS_PORT}"
        words = ["env", place, "RAY_external_storage_namespace=test", *words]
        words.append(f"--redis-password={PASSWORD}")
    for _ in range(STARTS - 1):
        try:
            host.run(*words, limit_s=START_S)
            return
        except (RuntimeError, subprocess.TimeoutExpired):
            kill_ray(host)
    host.run(*words, limit_s=START_S)


def start_worker(worker: Host, head: Host, *environment: str) -> None:
    """A node of Ray with CPUs."""
    worker.run(
        "env", *environment, "ray", "start", f"--address={head.ip}:{GCS_PORT}",
        f"--node-ip-address={worker.ip}", "--num-cpus=4", "--object-store-memory=200000000",
        "--disable-usage-stats",
    )  # fmt: skip


def kill_ray(host: Host) -> None:
    """Kill all processes of Ray on a host at once."""
    pids = {pid for word in OF_RAY for pid in host.pids(word)}
    assert pids
    host.run("kill", "-9", *pids)
    assert traces.wait_until(lambda: not host.pids("gcs_server"), 10) is not None


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture
def redis(hosts: Hosts) -> Iterator[None]:
    worker = hosts[1]
    server = subprocess.Popen(
        worker.enter(
            REDIS, "--port", REDIS_PORT, "--bind", worker.ip, "--requirepass", PASSWORD,
            "--save", "", "--dir", "/tmp",
        ),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    yield
    server.kill()
    server.wait()


@needs_redis
@pytest.mark.cell("host", "idle", "private", "goes on (head)")
def test_a_gang_outlives_the_head(hosts: Hosts, redis: None) -> None:
    """With its submitted calls."""
    head, worker = hosts[0], hosts[1]

    def call(function: str, *arguments: Any, limit_s: float = 60.0) -> Any:
        return worker.call(f"{INSIDE}:{function}", *arguments, limit_s=limit_s)

    start_head(head, worker)
    start_worker(worker, head)
    pids = call("start_kept", RANKS, limit_s=120)
    fine = {"total": sum(range(RANKS)), "equal": True}
    assert call("works") == fine

    kill_ray(head)
    lost = time.monotonic()
    assert call("works") == fine  # its connections need no control store
    without_s = time.monotonic() - lost
    start_head(head, worker)
    back_s = time.monotonic() - lost
    assert call("works") == fine
    assert call("another", 1, limit_s=120) == 0  # new gangs start on the new head
    again_s = time.monotonic() - lost
    record("head lost, control store in a Redis: a call", without_s, None, "none")
    record("the same: the next gang (the head was away)", again_s, back_s, "none")

    call("submit", CALLS, GO)
    kill_ray(head)
    worker.leave()  # the program that started the gang ends
    start_head(head, worker)
    assert call("attach", limit_s=120) == pids
    worker.run("touch", GO)
    assert call("results", 60.0, limit_s=120) == list(range(CALLS))
    assert call("works") == fine
    assert "kept" not in call("end")


@pytest.mark.cell("host", "in a call", "named", "lost (head)")
def test_submitted_calls_are_lost_with_a_head_without_redis(hosts: Hosts) -> None:
    """The futures say so, and nothing is left of the gang, whose name is free."""
    head, worker = hosts[0], hosts[1]
    waits = f"RAY_gcs_rpc_server_reconnect_timeout_s={WITHOUT_HEAD_S}"

    def call(function: str, *arguments: Any, limit_s: float = 60.0) -> Any:
        return worker.call(f"{INSIDE}:{function}", *arguments, limit_s=limit_s)

    start_head(head)
    start_worker(worker, head, waits)
    pids = call("start_kept", RANKS, limit_s=120)
    call("submit", CALLS, GO)
    kill_ray(head)
    assert call("results", 100.0, limit_s=120) == ["GroupFailedError"] * CALLS
    assert traces.wait_until(lambda: not set(pids) & set(worker.pids()), 20) is not None
    worker.leave()

    start_head(head)
    start_worker(worker, head, waits)
    assert call("gangs", limit_s=60) == []
    assert call("start_kept", RANKS, limit_s=120)
    assert "kept" not in call("end")
