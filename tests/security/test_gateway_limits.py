"""What one client of a gateway can make it keep: commands under way, lines of the audit log."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from alchemist_ray.errors import AuthError, SessionError
from alchemist_ray.gateway import secure_socket
from alchemist_ray.gateway.protocol import GatewayAddress
from alchemist_ray.gateway.server import access, gangs, link
from alchemist_ray.gateway.server import gateway as served
from alchemist_ray.gateway.server.access import TokenFile
from alchemist_ray.gateway.server.gateway import Gateway
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Kind
from tests.security.test_gateway import SESSION, WAIT_S, check_served, refusal, refuses, tls
from tests.support.traces import wait_until

LOGGED = 5
ASKED = 500  # commands


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


def test_a_session_that_does_not_wait_for_answers_gets_them_one_after_the_other(
    address: GatewayAddress, token: str
) -> None:
    connection, _ = secure_socket.connect(address, token, SESSION)
    with connection:
        for ident in range(ASKED):
            connection.send(Kind.COMMAND, {"id": ident, "op": "nothing"})
        answers = [connection.expect(Kind.REPLY, WAIT_S).body["id"] for _ in range(ASKED)]
        assert answers == list(range(ASKED))


def test_a_client_that_does_not_read_is_dropped(
    gateway: Gateway, address: GatewayAddress, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SEND_TIMEOUT_S", 0.5)
    monkeypatch.setattr(gangs, "_listed", lambda: [{"name": "x" * (8 << 20), "named": True}])
    connection, _ = secure_socket.connect(address, token, SESSION)
    with connection:
        connection.send(Kind.COMMAND, {"id": 1, "op": "list_gangs"})
        assert wait_until(lambda: not gateway.link_limit.counts, WAIT_S) is not None
    check_served(address, token)


def test_the_waiting_calls_of_one_user_are_limited() -> None:
    waits = gangs.UserLimit(2, 3, "too many gangs are being started")
    with contextlib.ExitStack() as stack:
        for user in ("anna", "anna", "bert"):
            stack.enter_context(waits.one_of(user))
        with pytest.raises(Failure, match=r"2 by anna \(limit 2\), 3 by all users \(limit 3\)"):
            stack.enter_context(waits.one_of("anna"))
        with pytest.raises(Failure, match="0 by carl") as refused:
            stack.enter_context(waits.one_of("carl"))
        assert refused.value.kind == "ResourceError"
    with waits.one_of("anna"):
        assert waits.counts == {"anna": 1}


def test_a_command_that_fails_in_any_way_is_answered(
    address: GatewayAddress, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(gangs, "_listed", fail)
    connection, _ = secure_socket.connect(address, token, SESSION)
    with connection:
        connection.send(Kind.COMMAND, {"id": 1, "op": "list_gangs"})
        error = connection.expect(Kind.REPLY, WAIT_S).body["error"]
    assert "Too many open files" in error["message"]


def test_a_frame_that_fails_in_any_way_is_refused(
    gateway: Gateway, address: GatewayAddress, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(gateway, "_command", fail)
    connection, _ = secure_socket.connect(address, token, SESSION)
    with connection:
        connection.send(Kind.COMMAND, {"id": 1, "op": "list_gangs"})
        with pytest.raises(Failure, match="no luck"):
            connection.expect(Kind.REPLY, WAIT_S)


def test_strangers_cannot_fill_the_audit_log(
    gateway: Gateway, address: GatewayAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "LOGGED_REFUSALS", LOGGED)
    for _ in range(3 * LOGGED):
        with tls(address) as connection:
            connection.send(Kind.PROOF, {})
            assert "must open with HELLO" in refusal(connection)
    assert wait_until(lambda: gateway._refusals == 3 * LOGGED, WAIT_S) is not None  # of the last
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
        refuses(address, token, f"cafile={file}.* no usable certificates")
    for option in ("cafile=", "fingerprint=", "fingerprint=00ff", "fingerprint=" + "é" * 64):
        with pytest.raises(SessionError, match=r"must be (a file|64 hexadecimal digits)"):
            GatewayAddress.parse(f"alchemist://localhost?{option}")
    digest = gateway.fingerprint.upper()
    colons = ":".join(digest[i : i + 2] for i in range(0, 64, 2))
    for text in (digest, colons):
        found = GatewayAddress.parse(f"alchemist://localhost?fingerprint={text}")
        assert found.fingerprint == gateway.fingerprint


def renew(folder: Path, days: float) -> tuple[Path, Path]:
    """A certificate that is its own authority, as gateways make them, and its key."""
    files = folder / "own.crt", folder / "own.key"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access, "YEARS", days / 365)
        access._generate(*files)
    return files


def test_certificates_that_expire_are_refused_and_renewed_ones_are_read_again(
    tokens: TokenFile, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "POLL_INTERVAL_S", 0.0)
    files = [str(path) for path in renew(tmp_path, days=-0.5)]
    options = {"tokens": str(tokens.path), "audit": str(tmp_path / "audit.log")}
    options |= {"certfile": files[0], "keyfile": files[1]}
    with pytest.raises(AuthError, match=r"own\.crt expired on 20.*renew it"):
        Gateway("127.0.0.1", 0, **options)
    renew(tmp_path, days=20)[1].chmod(0o640)
    with pytest.raises(AuthError, match=r"chmod 600 .*own\.key"):
        Gateway("127.0.0.1", 0, **options)
    renew(tmp_path, days=20)
    gateway = Gateway("127.0.0.1", 0, **options)
    try:
        first = gateway.fingerprint
        address = GatewayAddress.parse(f"alchemist://localhost:{gateway.port}?cafile={files[0]}")
        secure_socket.connect(address, token, SESSION)[0].close()
        renew(tmp_path, days=10)
        secure_socket.connect(address, token, SESSION)[0].close()
        assert gateway.fingerprint != first
        renew(tmp_path, days=-0.5)  # a mistake: the one before is served on
        check_served(GatewayAddress("127.0.0.1", gateway.port), token)
        with pytest.raises(Failure, match=r"CERTIFICATE_VERIFY_FAILED, .*certificate"):
            secure_socket.connect(address, token, SESSION)
        words = "expired on", "the TLS handshake failed"
        told = lambda: all(one in gateway.audit.path.read_text() for one in words)  # noqa: E731
        assert wait_until(told, WAIT_S, 0.05) is not None
    finally:
        gateway.close()
