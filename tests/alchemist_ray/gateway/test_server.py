"""Starting and finding the gateway of a cluster."""

from __future__ import annotations

import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.cli import main
from alchemist_ray.errors import SessionError
from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.actor import GatewayInfo


def test_a_cluster_has_one_gateway_which_is_found(
    gateway: GatewayInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    assert actor.find() == gateway
    assert actor.serve("127.0.0.1", gateway.port) == gateway
    with AlchemistSession() as inside:
        assert inside.serve(host="127.0.0.1", port=0) == gateway
    assert main(["gateway", "--status"]) == 0
    shown = capsys.readouterr().out
    assert gateway.address in shown
    assert gateway.fingerprint in shown
    assert main(["gateway", "--port", "1"]) == 1
    assert "gateway --stop" in capsys.readouterr().err


def test_without_tls_only_loopback_is_possible() -> None:
    with pytest.raises(SessionError, match="loopback only"):
        actor.serve("0.0.0.0", tls=False)
    assert main(["gateway", "--no-tls"]) == 1
