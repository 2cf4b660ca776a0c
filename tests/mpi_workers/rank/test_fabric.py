"""MPI's network endpoints: none on one node, the interface of the node's address otherwise."""

from __future__ import annotations

import socket

import pytest

from mpi_workers.local import local_gang
from mpi_workers.rank import fabric
from mpi_workers.rank.fabric import limit_endpoints
from mpi_workers.wire.interfaces import interface_of

RANKS = "tests.mpi_workers.rank.ranks_fabric:"


def test_ranks_on_one_node_listen_on_no_port() -> None:
    found = local_gang.run(RANKS + "listeners", 2)
    assert found == {"listeners": [[], []], "sum": [1.0, 1.0], "transports": "self,sm"}


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_a_sites_own_transports_are_kept(netmod: str) -> None:
    env = {"UCX_TLS": "tcp", "FI_PROVIDER": "tcp", "MPIR_CVAR_CH4_NETMOD": netmod}
    before = dict(env)
    limit_endpoints("127.0.0.1", one_node=True, env=env)
    assert env == before


def test_libfabric_on_one_node_uses_shared_memory() -> None:
    env = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    limit_endpoints("127.0.0.1", one_node=True, env=env)
    assert env["FI_PROVIDER"] == "shm"


def test_on_several_nodes_mpi_uses_the_interface_of_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fabric, "_infiniband_ports", lambda: ["mlx5_0:1"])
    env: dict[str, str] = {}
    limit_endpoints("127.0.0.1", one_node=False, env=env)
    assert env == {"UCX_NET_DEVICES": "lo,mlx5_0:1", "FI_TCP_IFACE": "lo"}
    env = {"UCX_NET_DEVICES": "eth7"}
    limit_endpoints("127.0.0.1", one_node=False, env=env)
    assert env["UCX_NET_DEVICES"] == "eth7"
    env = {}
    limit_endpoints("203.0.113.9", one_node=False, env=env)  # not an address of this machine
    assert env == {}


def test_interfaces_are_found_by_their_addresses() -> None:
    assert interface_of("127.0.0.1") == "lo"
    if socket.has_ipv6 and "::1" in str(socket.getaddrinfo("localhost", None)):
        assert interface_of("0:0:0:0:0:0:0:1") == "lo"
    assert interface_of("203.0.113.9") is None
