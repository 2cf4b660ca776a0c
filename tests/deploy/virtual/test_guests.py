"""Two guests under QEMU, brought up by libvirt, and a gang across them.

Some minutes, most of them emulation: asked for by ALCHEMIST_TEST_GUESTS=1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alchemist_ray.deploy.virtual_cluster import cluster
from tests.deploy.virtual import lab
from tests.faults.hosts import Host, Hosts
from tests.support import commands

ASKED = "ALCHEMIST_TEST_GUESTS"
REASON = lab.why_not() if os.environ.get(ASKED) else f"takes minutes: {ASKED}=1 runs it"
MODE = ("--no-huge-pages",) if cluster.has_kvm() else ("--emulate",)
UP_S = 1500.0  # on a machine that others use too
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.timeout(3600, func_only=False),
]


class Lab:
    """A host with libvirt, and the command `alchemist` on it."""

    def __init__(self, host: Host, uri: str, scratch: Path) -> None:
        self.host, self.uri, self.scratch = host, uri, scratch
        self.state = scratch / "state"

    def run(
        self, *words: Any, limit_s: float = 120.0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return commands.run(
            *self.host.enter(*words),
            limit_s=limit_s,
            env={
                **self.host.environment(),
                "ALCHEMIST_VIRTUAL": str(self.state),
                "TMPDIR": str(self.scratch),
                **env,
            },
        )

    def alchemist(self, *words: Any, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "alchemist_ray.cli", "virtual-cluster", *words]
        return self.run(*command, limit_s=limit_s)

    def guests(self) -> list[str]:
        return self.host.run("virsh", "-c", self.uri, "list", "--all", "--name").split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    scratch = tmp_path_factory.mktemp("virtual")
    with Hosts(1, shared=[scratch]) as hosts, lab.libvirt_on(hosts[0], scratch) as uri:
        yield Lab(hosts[0], uri, scratch)


def test_a_gang_runs_across_two_guests_and_nothing_is_left(place: Lab) -> None:
    image = lab.guest_image()
    up = place.alchemist(
        "up", "--image", image, "--guests", 2, "--cpus", 1, "--memory", "2G", *MODE,
        "--connect", place.uri, "--network", lab.NETWORK, "--bridge", lab.BRIDGE, "--limit", UP_S,
        limit_s=UP_S + 100,
    )  # fmt: skip
    assert up.returncode == 0, up.stdout + up.stderr
    assert "Ray is up in 2 guest(s)" in up.stdout
    assert sorted(place.guests()) == ["vc-0-0", "vc-0-1"]
    again = place.alchemist("up", "--image", image, "--emulate", "--connect", place.uri)
    assert again.returncode == 1
    assert "there is a cluster 'vc' already" in again.stderr
    try:
        token = place.state / "vc" / "token"
        assert token.stat().st_mode & 0o077 == 0
        env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        }
        joined = place.run(
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=0"),
            *("--address=10.78.0.31:6379", f"--node-ip-address={lab.HERE}"),
            *("--object-store-memory=100000000", "--disable-usage-stats"),
            limit_s=400,
            **env,
        )
        assert joined.returncode == 0, joined.stdout + joined.stderr
        done = place.run(
            sys.executable, "-m", "tests.deploy.virtual.inside", limit_s=900,
            RAY_ADDRESS="10.78.0.31:6379", **env,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        told = json.loads(done.stdout.splitlines()[-1])
        assert sorted(told["hosts"]) == ["vc-0-0", "vc-0-1"]
        assert told["sum"] == 1
        assert told["error"] < 1e-10
    finally:
        down = place.alchemist("down")
    assert down.returncode == 0, down.stderr
    assert place.guests() == []
    assert not (place.state / "vc").exists()
    assert list(place.scratch.glob("alchemist-vc-*")) == []
    assert "qemu-system" not in place.host.run("ps", "-ww", "-eo", "args=")


def test_guests_that_do_not_boot_are_named_and_gone(place: Lab) -> None:
    image = lab.guest_image()
    up = place.alchemist(
        "up", "--name", "slow", "--image", image, "--cpus", 1, "--memory", "1G", "--emulate",
        "--connect", place.uri, "--network", lab.NETWORK, "--bridge", lab.BRIDGE, "--limit", 2,
    )  # fmt: skip
    assert up.returncode == 1
    assert "slow-0-0 not ready in 2 s" in up.stderr
    assert place.guests() == []
    assert not (place.state / "slow").exists()
    wrong = place.alchemist(
        "up", "--image", image, "--cpus", 1, "--memory", "1G", "--emulate",
        "--connect", place.uri, "--bridge", "nowhere0",
    )  # fmt: skip
    assert wrong.returncode == 1
    assert "nowhere0" in wrong.stderr
    assert place.guests() == []
