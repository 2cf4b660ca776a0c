"""What one client of a gateway can make it keep: commands under way, lines of the audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from alchemist_ray.errors import AuthError, SessionError
from alchemist_ray.gateway import secure_socket
from alchemist_ray.gateway.client import ask
from alchemist_ray.gateway.protocol import GatewayAddress
from alchemist_ray.gateway.server import gateway as served
from alchemist_ray.gateway.server import session_commands
from alchemist_ray.gateway.server.gateway import MAX_ASKED, Gateway
from alchemist_ray.gateway.server.tokens import TokenFile
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Kind, encode
from tests.security.test_gateway import SESSION, WAIT_S, check_served, refusal, tls

LOGGED = 5


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


@pytest.fixture
def token(tokens: TokenFile) -> str:
    return tokens.create("anna")


@pytest.fixture
def gateway(tokens: TokenFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setenv("HOME", str(tokens.path.parent))
    made = Gateway("127.0.0.1", 0, tokens=str(tokens.path))
    yield made
    made.close()


@pytest.fixture
def address(gateway: Gateway) -> GatewayAddress:
    return GatewayAddress("127.0.0.1", gateway.port)


def test_a_session_that_does_not_wait_for_answers_is_refused(
    address: GatewayAddress, token: str
) -> None:
    connection, _ = secure_socket.connect(address, token, SESSION)
    with connection:
        command = encode(Kind.COMMAND, {"id": 1, "op": "nothing"})
        connection.write(command * (20 * MAX_ASKED))

        def receive() -> None:
            for _ in range(20 * MAX_ASKED):
                connection.expect(Kind.REPLY, WAIT_S)

        with pytest.raises(Failure, match=f"{MAX_ASKED} commands wait for an answer"):
            receive()
    check_served(address, token)


def test_a_command_that_fails_in_any_way_is_answered(
    address: GatewayAddress, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(session_commands, "_listed", fail)
    connection, _ = secure_socket.connect(address, token, SESSION)
    with connection:
        connection.send(Kind.COMMAND, {"id": 1, "op": "list_gangs"})
        error = connection.expect(Kind.REPLY, WAIT_S).body["error"]
    assert "Too many open files" in error["message"]


def test_strangers_cannot_fill_the_audit_log(
    gateway: Gateway, address: GatewayAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "LOGGED_REFUSALS", LOGGED)
    for _ in range(3 * LOGGED):
        with tls(address) as connection:
            connection.send(Kind.PROOF, {})
            assert "must open with HELLO" in refusal(connection)
    gateway.close()
    lines = [json.loads(line) for line in gateway.audit.path.read_text().splitlines()]
    refused = [line for line in lines if line["event"] == "refused"]
    assert len(refused) == LOGGED + 1
    assert refused[-1]["omitted"] == 2 * LOGGED


def test_what_is_wrong_with_the_options_of_an_address_is_said(
    gateway: Gateway, token: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.pem").touch()
    for file in ("/nowhere.pem", str(tmp_path / "empty.pem")):
        address = GatewayAddress.parse(f"alchemist://127.0.0.1:{gateway.port}?cafile={file}")
        with pytest.raises(AuthError, match=f"cafile={file}.* no usable certificates"):
            ask(address, token, {"op": "list_gangs"})
    for option in ("cafile=", "fingerprint=", "fingerprint=00ff", "fingerprint=" + "é" * 64):
        with pytest.raises(SessionError, match=r"must be (a file|64 hexadecimal digits)"):
            GatewayAddress.parse(f"alchemist://localhost?{option}")
    digest = gateway.fingerprint.upper()
    colons = ":".join(digest[i : i + 2] for i in range(0, 64, 2))
    for text in (digest, colons):
        found = GatewayAddress.parse(f"alchemist://localhost?fingerprint={text}")
        assert found.fingerprint == gateway.fingerprint
