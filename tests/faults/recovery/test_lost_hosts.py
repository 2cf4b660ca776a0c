"""A gang with `max_failures` goes on when a host is lost: on other hosts, or on fewer ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.conftest import needs_hosts, record
from tests.faults.hosts import Host, Hosts

INSIDE = "tests.faults.inside"
ON_HOST = "tests.faults.recovery.on_host"
# Ray notices the loss after 15 s, later under load, and places ranks there until then.
BACK_LIMIT_S = 150.0

pytestmark = needs_hosts(450)


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        hosts.start_ray([2, 2, 2])
        assert hosts[0].call(f"{INSIDE}:join", 3, limit_s=60) == 3
        yield hosts


def loses(hosts: Hosts, found: list[str]) -> Host:
    """Kill a host that has ranks, but not the program."""
    lost = next(host for host in (hosts[1], hosts[2]) if host.name in found)
    hosts[0].begin(f"{ON_HOST}:until_back", lost.name)
    lost.kill()
    return lost


def test_a_checkpoint_folder_of_one_host_is_refused(three: Hosts) -> None:
    said = three[0].call(f"{ON_HOST}:refused_folder", 6, limit_s=60)
    assert "does not see it" in said


@pytest.mark.cell("host", "in a call", "max_failures", "goes on")
def test_a_gang_goes_on_when_hosts_are_lost(three: Hosts) -> None:
    near = three[0]
    found = near.call(f"{ON_HOST}:start", 4, 6, limit_s=60)
    assert len(set(found)) == 2
    lost = loses(three, found)
    back = near.result(BACK_LIMIT_S)
    assert back["right"]
    assert len(back["hosts"]) == 4
    assert set(back["hosts"]).isdisjoint({lost.name})
    record("3 hosts: one is lost, gang with max_failures", back["seconds"], None, "recovered")
    near.call(f"{ON_HOST}:close", limit_s=40)
    # Two hosts are left. This one may have fewer ranks.
    found = near.call(f"{ON_HOST}:start", [1, 4], 4, limit_s=60)
    assert len(found) == 4
    loses(three, found)
    back = near.result(BACK_LIMIT_S)
    assert back["right"]
    assert set(back["hosts"]) == {near.name}  # on one or both of its CPUs
    record("2 hosts: one is lost, gang of 1 to 4", back["seconds"], None, "recovered")
    near.call(f"{ON_HOST}:close", limit_s=40)
