"""The gateway's listener: strangers, wrong tokens, other versions, malformed frames, crowds."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from alchemist_ray.errors import AlchemistError, AuthError, BadArgumentError, SessionError
from alchemist_ray.gateway import protocol, secure_socket
from alchemist_ray.gateway.client import ask
from alchemist_ray.gateway.protocol import PROTOCOL, GatewayAddress
from alchemist_ray.gateway.server import link
from alchemist_ray.gateway.server.access import Identity, TokenFile, certificate
from alchemist_ray.gateway.server.gateway import Gateway
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.wire import frames
from mpi_workers.wire.acceptor import MAX_STRANGERS
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Kind
from tests.security.test_fuzzed_listeners import Fuzzer
from tests.support import traces
from tests.support.frames import MALFORMED, UNAUTHENTICATED, UNPROVED, framed
from tests.support.suite import scaled
from tests.support.traces import wait_until, within

CROWD = 2000  # idle connections
FRAMES = scaled(1500, 300_000)
SEED = int(os.environ.get("ALCHEMIST_FUZZ_SEED", random.randrange(1 << 32)))
WAIT_S = 10.0
GROWTH_NBYTES = 96 << 20  # 96 MiB
SESSION = {"role": "session", "where": "a test"}

pytestmark = pytest.mark.timeout(scaled(300, 7200), func_only=True)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return TokenFile(tmp_path_factory.mktemp("tokens") / "tokens.json")


@pytest.fixture(scope="module")
def token(tokens: TokenFile) -> str:
    return tokens.create("anna", ("call",))


@pytest.fixture(scope="module")
def gateway(tokens: TokenFile) -> Iterator[Gateway]:
    folder = tokens.path.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        made = Gateway("127.0.0.1", 0, tokens=str(tokens.path), audit=str(folder / "audit.log"))
    yield made
    made.close()


@pytest.fixture
def address(gateway: Gateway) -> GatewayAddress:
    return GatewayAddress("127.0.0.1", gateway.port)


def tls(address: GatewayAddress) -> Connection:
    """A connection of a stranger, after the handshake of TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    raw = socket.create_connection((address.host, address.port), WAIT_S)
    return Connection(context.wrap_socket(raw))


def check_served(address: GatewayAddress, token: str) -> None:
    connection, welcome = secure_socket.connect(address, token, SESSION)
    with connection:
        assert welcome["scopes"] == ["call"]
        connection.send(Kind.COMMAND, {"id": 1, "op": "nothing"})
        answer = connection.expect(Kind.REPLY, WAIT_S).body
        assert "does not know the command 'nothing'" in answer["error"]["message"]


def refuses(
    address: GatewayAddress, token: str, words: str, kind: type[Exception] = AuthError
) -> str:
    """Check that a client is refused with these words; the whole message."""
    with pytest.raises(kind, match=words) as refused:
        ask(address, token, {"op": "list_gangs"})
    return str(refused.value)


def rss_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def refusal(connection: Connection) -> str:
    """Why the gateway closes a connection; empty if it says nothing."""
    with contextlib.suppress(frames.ConnectionLost, ConnectionError, ssl.SSLError):
        while True:
            frame = connection.recv(WAIT_S)
            if frame.kind == Kind.REFUSED:
                return str(frame.body["message"])
            assert frame.kind == Kind.CHALLENGE
    return ""


# --- tokens ---


def test_a_valid_token_is_served(address: GatewayAddress, token: str) -> None:
    check_served(address, token)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t[:-1] + ("0" if t[-1] != "0" else "1"), "does not know the token"),
        (lambda t: t.replace("_", "_0", 1)[:-1], "unknown token: it was revoked"),
        (lambda t: "", "a gateway requires a token"),
        (lambda t: "password", "begins with alch_"),
        (lambda t: t.rpartition("_")[0] + "_", "begins with alch_"),
    ],
)
def test_a_wrong_or_missing_token_is_refused_without_being_repeated(
    address: GatewayAddress, token: str, damage: object, message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("ALCHEMIST_TOKEN", raising=False)
    wrong = damage(token)
    said = refuses(address, wrong, message)
    secret = wrong.rpartition("_")[2]
    assert not secret or secret not in said


def test_expired_and_revoked_tokens_are_refused_also_on_open_connections(
    address: GatewayAddress, tokens: TokenFile
) -> None:
    for days in (0, -1, 1e9, float("nan")):
        with pytest.raises(BadArgumentError, match="days must be"):
            tokens.create("ben", ("call",), days=days)
    expiring = tokens.create("ben", ("call",), days=2.0 / 86400)
    revoked = tokens.create("carl", ("call",))
    opened = [secure_socket.connect(address, one, SESSION)[0] for one in (expiring, revoked)]
    tokens.revoke(protocol.parts_of(revoked)[0])
    time.sleep(2.1)
    for connection in opened:
        with connection:
            connection.send(Kind.COMMAND, {"id": 1, "op": "list_gangs"})
            answer = connection.expect(Kind.REPLY, WAIT_S).body
            assert answer["error"]["kind"] == "AuthError"
    refuses(address, expiring, "expired")
    refuses(address, revoked, "unknown token")


def test_the_file_of_tokens_admits_nobody(tokens: TokenFile, token: str) -> None:
    content = tokens.path.read_text()
    ident, secret = protocol.parts_of(token)
    assert ident in content
    assert secret not in content
    assert tokens.path.stat().st_mode & 0o777 == 0o600
    found = tokens.find(ident)
    assert found is not None
    # With what the file has in place of the key, a proof is not accepted.
    nonces, fields = bytes(64), b"\x80"
    stolen = found[1].stored_key
    assert not protocol.is_proved(found[1], nonces, b"", stolen, fields)


def test_a_file_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    text = file.create("anna")
    os.chmod(file.path, 0o644)
    with pytest.raises(AuthError, match="chmod 600"):
        TokenFile(file.path).find(protocol.parts_of(text)[0])
    file.path.write_text("{}")
    os.chmod(file.path, 0o600)
    with pytest.raises(AuthError, match="not a file of tokens"):
        TokenFile(file.path).list()
    with pytest.raises(BadArgumentError, match="scope"):
        TokenFile(tmp_path / "other.json").create("anna", ("everything",))


def test_the_audit_log_names_refusals_and_no_secret(
    gateway: Gateway, address: GatewayAddress, token: str
) -> None:
    check_served(address, token)
    log = gateway.audit.path.read_text()
    assert '"event": "refused"' in log
    assert '"event": "session"' in log
    assert '"user": "anna"' in log
    assert protocol.parts_of(token)[1] not in log
    assert gateway.audit.path.stat().st_mode & 0o777 == 0o600


# --- versions, certificates ---


def test_another_version_is_told_which_one_it_needs(address: GatewayAddress) -> None:
    hello = {"id": "0" * 12, "nonce": bytes(32), "protocols": [98, 99]}
    with tls(address) as connection:
        connection.send(Kind.HELLO, hello)
        message = refusal(connection)
    assert "supports protocol versions 1 to 1" in message
    assert "install alchemist-client " in message
    later = frames.HEADER.pack(b"ALCH", frames.VERSION + 1, Kind.HELLO, 0, 0)
    with tls(address) as connection:
        connection.write(later)
        assert f"protocol version is {frames.VERSION} here" in refusal(connection)


def test_an_older_or_newer_client_is_served_or_told_what_to_install(
    address: GatewayAddress, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in (link, secure_socket):  # a newer gateway, a newer client
        with monkeypatch.context() as newer:
            newer.setattr(side, "PROTOCOL", PROTOCOL + 1)
            check_served(address, token)
            newer.setattr(side, "OLDEST_PROTOCOL", PROTOCOL + 1)
            refuses(address, token, f"install alchemist-client {__version__}")


def test_a_process_in_between_with_another_certificate_is_noticed(
    address: GatewayAddress, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".config/alchemist/gateway"
    context, _, _ = Identity(*certificate(None, None), print).look()
    assert folder.is_dir()
    listener = socket.create_server(("127.0.0.1", 0))

    def between() -> None:
        raw, _ = listener.accept()
        with contextlib.suppress(OSError, ssl.SSLError):
            client = context.wrap_socket(raw, server_side=True)
            inner = tls(address).sock
            client.settimeout(WAIT_S)
            while data := client.recv(4096):  # HELLO, then what the client says next
                inner.sendall(data)
                client.sendall(inner.recv(4096))

    thread = threading.Thread(target=between, daemon=True)
    thread.start()
    caught = GatewayAddress("127.0.0.1", listener.getsockname()[1])
    refuses(caught, token, "another process is between")
    listener.close()


def test_a_fingerprint_or_an_authority_can_be_demanded(
    gateway: Gateway, address: GatewayAddress, token: str, tokens: TokenFile
) -> None:
    right = GatewayAddress.parse(f"{address}?fingerprint={gateway.fingerprint}")
    check_served(right, token)
    wrong = GatewayAddress.parse(f"{address}?fingerprint={'0' * 64}")
    refuses(wrong, token, "fingerprint")
    own = tokens.path.parent / ".config/alchemist/gateway/certificate.pem"
    signed = GatewayAddress.parse(f"alchemist://localhost:{address.port}?cafile={own}")
    check_served(signed, token)
    untrusted = GatewayAddress.parse(f"alchemist://127.0.0.1:{address.port}?cafile={own}")
    reason = r"TLS handshake .*CERTIFICATE_VERIFY_FAILED, .*not valid for '127\.0\.0\.1'"
    refuses(untrusted, token, reason)  # what a user sees
    off = GatewayAddress.parse(f"{address}?tls=off")
    refuses(off, token, r"\?tls=off: leave it out", SessionError)


def test_without_tls_only_loopback_is_served(tokens: TokenFile, token: str) -> None:
    with pytest.raises(SessionError, match="loopback only"):
        Gateway("0.0.0.0", 0, tls=False)
    with pytest.raises(SessionError, match="on this machine"):
        GatewayAddress.parse("alchemist://example.org?tls=off")
    audit = str(tokens.path.parent / "plain.log")
    plain = Gateway("127.0.0.1", 0, tls=False, tokens=str(tokens.path), audit=audit)
    try:
        check_served(GatewayAddress.parse(f"alchemist://127.0.0.1:{plain.port}?tls=off"), token)
    finally:
        plain.close()


# --- malformed, slow, many ---


@pytest.mark.parametrize("name", [*MALFORMED, *UNAUTHENTICATED])
def test_malformed_frames_of_strangers_are_refused(address: GatewayAddress, name: str) -> None:
    with tls(address) as connection, contextlib.suppress(OSError, frames.ConnectionLost):
        connection.write((MALFORMED | UNAUTHENTICATED)[name])
        socket.socket.shutdown(connection.sock, socket.SHUT_WR)
        message = refusal(connection)
        assert not message or message.startswith("refused:")


def test_bytes_that_are_not_tls_are_dropped(address: GatewayAddress, token: str) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\x16\x03\x01" + b"\xff" * 600):
        with socket.create_connection((address.host, address.port), WAIT_S) as sock:
            sock.sendall(data)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1000):
                    pass
    check_served(address, token)


def test_a_stranger_that_sends_slowly_is_refused_in_time(
    address: GatewayAddress, token: str
) -> None:
    hello = frames.encode(Kind.HELLO, {"id": "x", "nonce": bytes(32), "protocols": [1, 1]})
    begun = traces.clock()
    with tls(address) as connection:
        refused = False
        while not refused and traces.clock() - begun < 2 * WAIT_S:
            connection.write(hello[:1])
            hello = hello[1:] + hello[:1]
            time.sleep(0.1)
            refused = connection.readable()
    assert refused
    assert traces.clock() - begun < WAIT_S
    check_served(address, token)


def test_a_client_that_never_reads_costs_bounded_memory(
    address: GatewayAddress, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rss_nbytes()
    connection, _ = secure_socket.connect(address, token, SESSION, shared=False)
    command = frames.encode(Kind.COMMAND, {"id": 1, "op": "x" * 8000}) * 100
    connection.sock.settimeout(WAIT_S)
    with connection, contextlib.suppress(OSError, frames.ConnectionLost):
        for _ in range(200):  # 160 MB of commands, and as much of answers
            connection.write(command)
    assert rss_nbytes() - before < 2 * GROWTH_NBYTES
    check_served(address, token)


def test_two_thousand_idle_connections_keep_nobody_out(
    gateway: Gateway, address: GatewayAddress, token: str
) -> None:
    fds, before = len(os.listdir("/proc/self/fd")), rss_nbytes()
    crowd = []
    try:
        for _ in range(CROWD):
            crowd.append(socket.create_connection((address.host, address.port), WAIT_S))
            if len(crowd) % 100 == 0:
                time.sleep(0.01)
        few = wait_until(lambda: len(gateway.acceptor.strangers) <= MAX_STRANGERS, WAIT_S)
        assert few is not None
        with within(5):
            check_served(address, token)
        # Both ends of a connection are in this process.
        most = fds + len(crowd) + MAX_STRANGERS + 16
        assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= most, WAIT_S) is not None
        assert rss_nbytes() - before < GROWTH_NBYTES
    finally:
        for sock in crowd:
            sock.close()


def test_connections_of_a_user_are_limited(
    gateway: Gateway, address: GatewayAddress, token: str, tokens: TokenFile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gateway.link_limit, "of_user", 5)
    other = tokens.create("dora", ("call",))
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(secure_socket.connect(address, other, SESSION)[0])
        with pytest.raises(Failure, match="too many connections: 5 by dora"):
            secure_socket.connect(address, other, SESSION)
        check_served(address, token)  # another user
    assert wait_until(lambda: _is_served(address, other), WAIT_S) is not None


def _is_served(address: GatewayAddress, token: str) -> bool:
    try:
        check_served(address, token)
    except (Failure, AlchemistError):
        return False
    return True


def test_no_random_frame_crashes_the_gateway_or_passes_its_handshake(
    gateway: Gateway, address: GatewayAddress, token: str
) -> None:
    print(f"seed {SEED}")
    fuzzer = Fuzzer(SEED)
    dice = fuzzer.dice
    sent = 0
    rss = 0
    fds = len(os.listdir("/proc/self/fd"))
    while sent < FRAMES:
        count = dice.choice([1, 2, 4, 8, 16])
        data = b"".join(fuzzer.frame() for _ in range(count))
        if dice.random() < 0.1:
            data += framed(Kind.HELLO, dice.choice(list(UNPROVED.values()))[20:])
        _attack(address, token, dice.choice(["stranger", "challenged", "session", "data"]), data)
        sent += count
        if dice.random() < 0.01:
            check_served(address, token)
            rss = rss or rss_nbytes()
    check_served(address, token)
    assert rss_nbytes() - (rss or rss_nbytes()) < GROWTH_NBYTES
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds + 4, WAIT_S) is not None


def _attack(address: GatewayAddress, token: str, stage: str, data: bytes) -> None:
    with contextlib.ExitStack() as stack:
        if stage == "session":
            connection, _ = secure_socket.connect(address, token, SESSION, shared=False)
        elif stage == "data":
            fields = {"role": "data", "gang": "g0123456789", "process": "x"}
            with pytest.raises(Failure, match="has ended"):
                secure_socket.connect(address, token, fields)
            return
        else:
            connection = tls(address)
        stack.enter_context(connection)
        if stage == "challenged":
            side = protocol.ClientSide(token, {}, (1, 1))
            connection.send(Kind.HELLO, side.hello())
            assert connection.recv(WAIT_S).kind == Kind.CHALLENGE
        connection.sock.settimeout(WAIT_S)
        with contextlib.suppress(OSError, frames.WireError):
            connection.write(data)
            socket.socket.shutdown(connection.sock, socket.SHUT_WR)
            while True:
                answer = connection.recv(WAIT_S)
                assert answer.kind in (Kind.CHALLENGE, Kind.REFUSED, Kind.REPLY)
                assert stage == "session" or answer.kind != Kind.REPLY
