"""``alchemist doctor`` between nodes: two hosts in namespaces, and what can part them."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alchemist_ray.observe.doctor import node, probe
from alchemist_ray.observe.doctor.finding import BAD, OK, WARN
from tests.faults.conftest import HOSTLESS, needs_hosts
from tests.faults.hosts import GCS_PORT, NETWORK, Host, Hosts
from tests.support import commands, traces
from tests.support.frames import Faulty

# A clock that goes wrong by as many seconds as AHEAD says.
CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    int status = syscall(SYS_clock_gettime, id, t);
    if (id == CLOCK_REALTIME && getenv("AHEAD")) t->tv_sec += atoi(getenv("AHEAD"));
    return status;
}
"""
LISTENER = """
import sys
from alchemist_ray.observe.doctor import probe
print(*probe.Listener("far", "127.0.0.1").address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts with a Ray cluster of 2 CPUs each."""
    with Hosts(2) as both:
        both.start_ray([2, 2])
        yield both


def doctor(host: Host, *words: str, limit_s: float = 100.0) -> tuple[int, dict[str, Any]]:
    """Exit code and report of the command on a host."""
    command = host.enter(*commands.ALCHEMIST, "doctor", "--json", *words)
    done = commands.run(*command, env=host.environment(), limit_s=limit_s)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def of(told: dict[str, Any], check: str) -> list[dict[str, str]]:
    return [f for f in told["findings"] if f["check"] == check]


class TestHosts:
    """In order: the last ones leave the hosts in pieces."""

    pytestmark = needs_hosts(150)

    def test_two_sound_hosts_are_sound(self, hosts: Hosts) -> None:
        code, told = doctor(hosts[0], "--nodes", "2", "--ranks-per-node", "1")
        wrong = [f for f in told["findings"] if f["status"] == BAD]
        assert (code, wrong) == (0, [])
        assert sorted(told["nodes"]) == sorted(hosts[i].name for i in (0, 1))
        (found,) = of(told, "between nodes")
        assert "2 connections" in found["message"]
        assert of(told, "PMI")[0]["message"].startswith("one world of 2")
        assert of(told, "gang")[0]["message"].startswith("2 ranks on 2 nodes")
        (mpi,) = of(told, "MPI of the ranks")
        assert "libmpi" in mpi["message"]
        (talk,) = of(told, "network of the ranks")
        assert "TCP over eth0" in talk["message"]
        assert of(told, "clocks")[0]["status"] == of(told, "ranks started again")[0]["status"] == OK
        assert {f["status"] for f in of(told, "host name")} == {WARN}  # in no /etc/hosts here
        assert len(of(told, "MPI library")) == 2
        assert "Ray uses eth0" in of(told, "network interface")[0]["message"]

    def test_the_hpc_check_measures_between_them(self, hosts: Hosts) -> None:
        """`alchemist bench hpc`, here because hosts are dear."""
        words = ["bench", "hpc", "--json", "--workers", "2", "--seconds", "0.2"]
        command = hosts[0].enter(*commands.ALCHEMIST, *words)
        told = json.loads(commands.output(*command, env=hosts[0].environment()))
        named = {m["what"]: m for m in told["measures"]}
        assert told["nodes"] == 2
        assert named["ping-pong between nodes, 8 B"]["value"] > 0
        assert "ping-pong within a node, 8 B" not in named

    def test_more_ranks_than_cores_and_fewer_nodes_than_wanted(self, hosts: Hosts) -> None:
        many = len(list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*"))) + 1
        code, told = doctor(hosts[0], "--nodes", "3", "--ranks-per-node", str(many))
        assert code == 1
        assert "Ray has 2 of 3 nodes" in of(told, "nodes")[0]["message"]
        assert {f["status"] for f in of(told, "threads of the ranks")} == {WARN}

    def test_a_launcher_that_cannot_is_named(self, hosts: Hosts) -> None:
        code, told = doctor(hosts[0], "--launcher", "mpiexec")
        assert code == 1
        (gang,) = of(told, "gang")
        assert "works on one machine" in gang["message"]

    def test_a_firewall_between_them_is_found_in_the_direction_it_has(self, hosts: Hosts) -> None:
        if not shutil.which("iptables"):
            pytest.skip("no iptables on this machine")
        near, far = hosts[0], hosts[1]
        # Ray's own ports stay open; the first host's new connections to listeners are dropped.
        wall = ["INPUT", "-p", "tcp", "--syn", "-s", near.ip]
        ports = ["--dport", "32768:60999", "-j", "DROP"]
        near_listener = near.call("tests.alchemist_ray.observe.doctor_inside:open_listener", far.ip)
        far_listener = far.call("tests.alchemist_ray.observe.doctor_inside:open_listener", near.ip)
        far.run("iptables", "-A", *wall, *ports)
        try:
            both = {near.name: near_listener, far.name: far_listener}
            dialled = {
                host.name: host.call("tests.alchemist_ray.observe.doctor_inside:dial", both, 1.0)
                for host in (near, far)
            }
        finally:
            far.run("iptables", "-D", *wall, *ports)
        (found,) = probe.reached(dialled)
        assert found.status == BAD
        assert found.message.startswith("1 of 2 connections fail")
        assert f"{near.name} -> {far.name}: no answer from {far.ip}:" in found.message
        assert found.node == near.name
        assert "ip_local_port_range" in found.advice

    def test_a_host_that_falls_silent_does_not_hold_it_up(self, hosts: Hosts) -> None:
        hosts[1].cut()
        try:
            code, told = doctor(
                hosts[0], "--nodes", "2", "--address", f"{NETWORK}.1:{GCS_PORT}",
                "--start-timeout", "20", limit_s=120,
            )  # fmt: skip
        finally:
            hosts[1].mend()
        assert code == 1
        silent = [f for f in of(told, "node") if f["node"] == hosts[1].name]
        assert silent or "Ray has 1 of 2 nodes" in of(told, "nodes")[0]["message"]


@pytest.mark.root
@pytest.mark.skipif(HOSTLESS is not None, reason=HOSTLESS or "")
def test_where_no_ray_runs_one_is_started_for_the_gang_and_gone() -> None:
    with Hosts(1) as hosts:
        command = ["env", "--unset=RAY_ADDRESS", *commands.ALCHEMIST, "doctor", "--json"]
        done = commands.run(*hosts[0].enter(*command), env=hosts[0].environment(), limit_s=110)
        told = json.loads(done.stdout)
        wrong = [f for f in told["findings"] if f["status"] == BAD]
        assert (done.returncode, wrong) == (0, []), done.stderr[-2000:]
        assert "one was started for these checks" in of(told, "Ray address")[0]["message"]
        assert of(told, "gang")[0]["message"].startswith("2 ranks on 1 node in")
        assert "shared memory" in of(told, "network of the ranks")[0]["message"]
        assert traces.wait_until(lambda: not hosts[0].pids("ray"), 20.0, 0.2) is not None


# --- without hosts --------------------------------------------------------------------


def test_a_clock_that_goes_wrong_is_seen(tmp_path: Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    commands.output("cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c")
    for ahead, status in ((0, OK), (20, WARN), (-3000, BAD)):
        with subprocess.Popen(
            [sys.executable, "-c", LISTENER],
            env={"LD_PRELOAD": str(library), "AHEAD": str(ahead), "PYTHONPATH": ":".join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as far:
            assert far.stdout is not None
            host, port = far.stdout.readline().split()
            dialled = {"near": probe.dial("near", {"near": ["", 0], "far": [host, int(port)]})}
        (found,) = probe.clocks(dialled)
        assert found.status == status, found
        assert abs(dialled["near"][0]["ahead"] - ahead) < 0.5
        if ahead:
            assert "far is" in found.message


def test_a_listener_outlives_errors_of_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = Faulty(socket.create_server(("127.0.0.1", 0)), [errno.EPROTO, errno.EMFILE])
    monkeypatch.setattr(probe.socket, "create_server", lambda *_, **__: listening)
    listener = probe.Listener("far", "127.0.0.1")
    for _ in range(2):
        (told,) = probe.dial("near", {"near": ["", 0], "far": listener.address})
        assert told["why"] == ""
    assert not listening.errors
    listener.close()


def test_doors_that_are_shut_or_anothers() -> None:
    listener = probe.Listener("far", "127.0.0.1")
    place = list(listener.address)
    (told,) = probe.dial("near", {"near": ["", 0], "far": place})
    assert told["why"] == ""
    (told,) = probe.dial("near", {"near": ["", 0], "other": place})
    assert "two nodes have one address" in told["why"]
    assert probe.dial("without a listener", {"far": place}) == []
    listener.close()
    (told,) = probe.dial("near", {"near": ["", 0], "far": place})
    assert "refused" in told["why"]


def test_large_clusters_dial_few() -> None:
    names = [f"n{i:04}" for i in range(1000)]
    dialled = {name: probe.neighbours(name, names) for name in names}
    assert max(map(len, dialled.values())) <= 20
    assert all(name in dialled[other] for name in names for other in dialled[name])  # each way
    few = names[:16]
    assert all(len(probe.neighbours(name, few)) == 15 for name in few)


def test_nodes_with_other_versions_are_named() -> None:
    ours = node.versions()
    (fine,) = probe.same_versions({"a": ours, "b": ours})
    assert fine.status == OK
    assert f"ray {ours['ray']}" in fine.message
    found = probe.same_versions({"a": ours, "b": {**ours, "ray": "1.0"}, "c": ours})
    assert [(f.status, f.node) for f in found] == [(BAD, "b")]
    assert "ray 1.0, the others have" in found[0].message
