"""A client on a host without Ray, a gateway on another host, and a gang over two hosts."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.conftest import needs_hosts
from tests.faults.hosts import Host, Hosts
from tests.support.suite import scaled
from tests.support.thin_clients import NOT_ON_CLIENTS

pytestmark = needs_hosts(scaled(150, 400))

OUTAGE_S = float(scaled(8, 60))  # the connection for commands is given up after 6 s
BEGIN = f"""
import sys
sys.modules.update(dict.fromkeys({NOT_ON_CLIENTS!r}))
import numpy as np
from alchemist_ray import AlchemistSession
"""

EVERY_LAYOUT = """
LAYOUTS = (
    "MC_MR", "MC_STAR", "MD_STAR", "MR_MC", "MR_STAR", "STAR_MC", "STAR_MD", "STAR_MR",
    "STAR_STAR", "STAR_VC", "STAR_VR", "VC_STAR", "VR_STAR", "CIRC_CIRC",
)
generator = np.random.default_rng(0)
small = generator.random((501, 307))
large = generator.random((5001, 1003))  # 40 MB: several chunks, and several pieces of each
with AlchemistSession(4) as als:
    assert len({worker.hostname for worker in als.list_workers()}) == 2
    for layout in LAYOUTS:
        for matrix in (small, np.asfortranarray(small), small[::-2, 3:]):
            handle = als.send_matrix(matrix, layout=layout)
            assert np.array_equal(handle.fetch(), matrix), layout
            part = handle.fetch(rows=slice(100, 240, 3), cols=slice(7, 9))
            assert np.array_equal(part, matrix[100:240:3, 7:9]), layout
    for layout, order in (("VC_STAR", "C"), ("STAR_VR", "C"), ("MC_MR", "F"), ("STAR_MC", "F")):
        matrix = np.asarray(large, order=order)
        handle = als.send_matrix(matrix, layout=layout)
        assert np.array_equal(handle.fetch(), matrix), layout
        assert np.array_equal(handle.to_layout("MR_MC").fetch(), matrix), layout
    linalg = als.load_library("linalg")
    assert np.isclose(float(linalg.norm(handle)), np.linalg.norm(large))
print("equal")
"""

UNTIL_AN_OUTAGE_IS_OVER = f"""
import time

matrix = np.random.default_rng(1).random((12_500, 1000))  # 100 MB
deadline = time.monotonic() + {5 * OUTAGE_S + 30}
with AlchemistSession(4) as als:
    kept = als.send_matrix(matrix[:10])
    spent = 0
    while spent < {0.8 * OUTAGE_S}:  # until a transfer has lasted as long
        assert time.monotonic() < deadline
        begun = time.monotonic()
        handle = als.send_matrix(matrix)
        assert np.array_equal(handle.fetch(), matrix)
        spent = time.monotonic() - begun
    assert np.array_equal(kept.fetch(), matrix[:10])
print("equal")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """The head, another node of the cluster, and a client's host."""
    with Hosts(3) as made:
        made.start_ray([2, 2])
        yield made


@pytest.fixture(scope="module")
def access(hosts: Hosts) -> dict[str, str]:
    """Address and token of a gateway on the head."""
    return hosts[0].call("tests.faults.inside:serve", 2, limit_s=90)


def run_client(host: Host, access: dict[str, str], program: str) -> str:
    """Run a program without Ray on a host; its output."""
    variables = [f"ALCHEMIST_ADDRESS={access['address']}", f"ALCHEMIST_TOKEN={access['token']}"]
    text = BEGIN + textwrap.dedent(program)
    limit_s = scaled(120, 360)
    return host.run("env", *variables, sys.executable, "-c", text, limit_s=limit_s)


def test_matrices_reach_a_gang_on_two_hosts_in_every_layout(
    hosts: Hosts, access: dict[str, str]
) -> None:
    assert run_client(hosts[2], access, EVERY_LAYOUT).endswith("equal\n")


@pytest.mark.cell("network", "sending", "gateway", "goes on")
def test_an_outage_of_the_clients_network_during_a_transfer_is_survived(
    hosts: Hosts, access: dict[str, str]
) -> None:
    def fail() -> None:
        time.sleep(5.0)  # the session has begun
        hosts[2].cut()
        time.sleep(OUTAGE_S)
        hosts[2].mend()

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(fail)
        said = run_client(hosts[2], access, UNTIL_AN_OUTAGE_IS_OVER)
        failing.result()
    assert said.endswith("equal\n")
