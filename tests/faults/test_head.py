"""The head is lost, Ray's control store is in a Redis, and gangs on other nodes stay."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import HOSTLESS, needs_hosts, record
from tests.faults.hosts import GCS_PORT, Host, Hosts
from tests.support import traces

REDIS = shutil.which("redis-server")
REASON = HOSTLESS or (None if REDIS else "no redis-server (apt-get install redis-server)")
pytestmark = needs_hosts(400, REASON)

REDIS_PORT = 6390
PASSWORD = "of this test"
RANKS = 2
STARTS, START_S = 3, 50.0
INSIDE = "tests.faults.inside"
OF_RAY = ("gcs_server", "raylet", "dashboard", "ray::", "log_monitor", "monitor.py")


def start_head(host: Host, redis: Host) -> None:
    """Ray's head without CPUs, whose control store is in the Redis.

    The first raylet on the address of a lost one can end at once. Kubernetes would start its
    container again; so does this.
    """
    words = (
        "env", f"RAY_REDIS_ADDRESS={redis.ip}:{REDIS_PORT}",
        "RAY_external_storage_namespace=test",
        "ray", "start", "--head", f"--port={GCS_PORT}", f"--node-ip-address={host.ip}",
        "--num-cpus=0", "--object-store-memory=200000000", "--include-dashboard=false",
        f"--redis-password={PASSWORD}", "--disable-usage-stats",
    )  # fmt: skip
    for _ in range(STARTS - 1):
        try:
            host.run(*words, limit_s=START_S)
            return
        except (RuntimeError, subprocess.TimeoutExpired):
            kill_ray(host)
    host.run(*words, limit_s=START_S)


def kill_ray(host: Host) -> None:
    """Kill all processes of Ray on a host at once."""
    pids = {pid for word in OF_RAY for pid in host.pids(word)}
    assert pids
    host.run("kill", "-9", *pids)
    assert traces.wait_until(lambda: not host.pids("gcs_server"), 10) is not None


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        worker = hosts[1]
        redis = subprocess.Popen(
            worker.enter(
                REDIS, "--port", REDIS_PORT, "--bind", worker.ip, "--requirepass", PASSWORD,
                "--save", "", "--dir", "/tmp",
            ),
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield hosts
        finally:
            redis.kill()
            redis.wait()


@pytest.mark.cell("host", "idle", "private", "goes on (head)")
def test_a_gang_outlives_the_head(hosts: Hosts) -> None:
    head, worker = hosts[0], hosts[1]

    def call(function: str, *arguments: Any, limit_s: float = 60.0) -> Any:
        return worker.call(f"{INSIDE}:{function}", *arguments, limit_s=limit_s)

    start_head(head, worker)
    worker.run(
        "ray", "start", f"--address={head.ip}:{GCS_PORT}", f"--node-ip-address={worker.ip}",
        "--num-cpus=4", "--object-store-memory=200000000", "--disable-usage-stats",
    )  # fmt: skip
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

    worker.leave()  # the program that started the gang ends
    assert call("attach", limit_s=120) == pids
    assert call("works") == fine
    assert "kept" not in call("end")
