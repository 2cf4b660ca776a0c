"""Starting and finding the gateway of a cluster."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.cli import main
from alchemist_ray.errors import AuthError, SessionError
from alchemist_ray.gateway.server import actor, gateway
from alchemist_ray.gateway.server.actor import GatewayInfo
from mpi_workers.wire.acceptor import source_of


@pytest.mark.usefixtures("cluster")
def test_files_are_found_from_the_folder_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(actor, "NAME", "another-gateway")  # other tests use the usual one
    assert main(["gateway", "--port", "0", "--tokens", "mine.json"]) == 1
    assert f"no file of tokens {tmp_path}/mine.json" in capsys.readouterr().err
    assert main(["token", "--tokens", "mine.json", "create", "anna"]) == 0
    assert main(["gateway", "--port", "0", "--tokens", "mine.json", "--audit", "log/a"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^Accepting connections on \[::\]:[1-9]\d*$", shown, re.M)
    assert f"{tmp_path}/mine.json" in shown
    assert "expires" in shown
    assert (tmp_path / "log/a").exists()
    assert actor.stop()


def test_a_start_that_fails_is_made_again_once_when_clients_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor.exporter, "start", lambda measure: None)  # of the actor's process
    files = {name: str(tmp_path / name) for name in ("tokens", "audit")}
    started = actor.GatewayActor({"host": "127.0.0.1", "port": 0, "tls": True, **files})
    with pytest.raises(AuthError, match="no file of tokens"):
        started.about()
    assert main(["token", "--tokens", files["tokens"], "create", "anna"]) == 0
    with ThreadPoolExecutor(8) as clients:
        assert len(set(clients.map(lambda _: started.about().port, range(8)))) == 1
    started.close()


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
    assert main(["gateway", "--port", f"{gateway.port}", "--tokens", gateway.tokens]) == 0
    assert main(["gateway", "--port", f"{gateway.port}", "--tokens", "other.json"]) == 1
    assert f"with the tokens {gateway.tokens}" in capsys.readouterr().err
    assert main(["gateway", "--port", "1"]) == 1
    assert "gateway --stop" in capsys.readouterr().err


def test_the_status_of_no_gateway_is_an_exit_code(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "find", lambda: None)
    assert main(["gateway", "--status"]) == 1


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_are_those_of_ipv4_and_ipv6() -> None:
    with gateway._listen("::", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), 5), listener.accept()[0] as accepted:
                assert source_of(accepted.getpeername()) == host


def test_without_tls_only_loopback_is_possible() -> None:
    with pytest.raises(SessionError, match="loopback only"):
        actor.serve("0.0.0.0", tls=False)
    assert main(["gateway", "--no-tls"]) == 1
