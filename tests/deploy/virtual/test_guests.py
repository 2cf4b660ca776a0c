"""Guests under QEMU, brought up by libvirt, and a gang across them.

Some minutes, most of them emulation: asked for by ALCHEMIST_TEST_GUESTS=1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import pytest

from tests.deploy.virtual import lab
from tests.deploy.virtual.lab import Lab

ASKED = "ALCHEMIST_TEST_GUESTS"
REASON = lab.why_not() if os.environ.get(ASKED) else f"takes minutes: {ASKED}=1 runs it"
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.timeout(3600, func_only=False),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab.lab(tmp_path_factory.mktemp("virtual")) as found:
        yield found


def test_a_gang_runs_across_guests_which_come_and_go_and_nothing_is_left(place: Lab) -> None:
    up = place.up("--guests", 2)
    assert up.returncode == 0, up.stdout + up.stderr
    assert "Ray is up in 2 guests" in up.stdout
    assert sorted(place.guests()) == ["vc-0-0", "vc-0-1"]
    again = place.up("--guests", 2)
    assert again.returncode == 1
    assert "there is a cluster 'vc' already" in again.stderr
    clash = place.up("--join", "vc", name="more")
    assert clash.returncode == 1
    assert "10.78.0.31 belongs to a guest of cluster 'vc': choose another --first" in clash.stderr
    try:
        token = place.state / "vc" / "token"
        assert token.stat().st_mode & 0o077 == 0
        place.join_ray()
        done = place.run(
            sys.executable, "-m", "tests.deploy.virtual.inside",
            *place.words(name="more"), "--join", "vc", "--first", 41, limit_s=2400,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        told = json.loads(done.stdout.splitlines()[-1])
        assert [sorted(hosts) for hosts in told["hosts"]] == [
            ["vc-0-0", "vc-0-1"],
            ["more-0-0", "vc-0-0", "vc-0-1"],
            ["vc-0-0", "vc-0-1"],
        ]
        assert told["sum"] == 1
        assert max(told["errors"]) < 1e-10
    finally:
        down = place.alchemist("down")
    assert down.returncode == 0, down.stderr
    assert place.guests() == []
    assert list(place.state.iterdir()) == []
    assert list(place.scratch.glob("alchemist-vc-*")) == []
    assert "qemu-system" not in place.host.run("ps", "-ww", "-eo", "args=")


def test_guests_that_do_not_boot_are_named_and_gone(place: Lab) -> None:
    up = place.up("--limit", 2, name="slow", memory="1G")
    assert up.returncode == 1
    assert "slow-0-0 not ready in 2 s" in up.stderr
    assert place.guests() == []
    assert not (place.state / "slow").exists()
    wrong = place.up("--bridge", "nowhere0", memory="1G")
    assert wrong.returncode == 1
    assert "nowhere0" in wrong.stderr
    assert place.guests() == []
