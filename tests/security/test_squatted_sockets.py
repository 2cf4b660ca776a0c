"""A socket of another user is never used, and no process gets in without the token."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from mpi_workers.wire import sockets
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import ConnectionLost, Kind
from tests.security.conftest import OTHER_UID, Spawn, line_of
from tests.support import ranks

WAIT_S = 5.0

# Listens at a path; prints a line for every byte that it receives.
SQUATTER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("ready", flush=True)
    while True:
        peer, _ = listener.accept()
        print(len(peer.recv(4096)), flush=True)
"""

LISTENER_OF_A_BOUND_SOCKET = """
import socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""

CLIENT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(5)
    sock.connect(sys.argv[1])
    try:
        sock.sendall(bytes.fromhex(sys.argv[2]))
        print(len(sock.recv(4096)), flush=True)
    except ConnectionError:
        print(0, flush=True)
"""


def test_a_socket_in_a_folder_that_others_can_write_is_not_used(folder: Path) -> None:
    listener, address = sockets.listen_unix(f"{folder}/s.sock")
    with listener:
        assert sockets.reachable_here(address)
        for mode in (0o777, 0o755, 0o750, 0o701, 0o1777):
            folder.chmod(mode)
            assert not sockets.reachable_here(address)
            assert sockets.reachable_addresses([address, "tcp:h:1"]) == ["tcp:h:1"]
            with pytest.raises(PermissionError, match="folder of mode 0700"):
                sockets.dial(address)
        folder.chmod(0o700)
        sockets.dial(address).close()


def test_a_path_that_is_no_socket_or_a_link_is_not_used(folder: Path) -> None:
    listener, address = sockets.listen_unix(f"{folder}/s.sock")
    prefix = address.removesuffix("s.sock")
    (folder / "file").touch()
    (folder / "link").symlink_to(folder / "s.sock")
    os.symlink(folder, f"{folder}-link")
    try:
        with listener:
            for other in (f"{prefix}file", f"{prefix}link", f"{prefix}nothing"):
                assert not sockets.reachable_here(other)
            assert not sockets.reachable_here(address.replace(f"{folder}/", f"{folder}-link/"))
    finally:
        os.unlink(f"{folder}-link")


def test_the_same_path_on_another_node_is_not_near(folder: Path) -> None:
    listener, address = sockets.listen_unix(f"{folder}/s.sock")
    scheme, boot_id, path = address.split(":")
    with listener:
        for other in (f"{scheme}:{boot_id[::-1]}:{path}", f"{scheme}:{path}", f"{scheme}::{path}"):
            assert not sockets.reachable_here(other)
            with pytest.raises(OSError, match="is on another node"):
                sockets.dial(other)


def test_a_squatted_path_is_not_used(other_user: Spawn) -> None:
    shared = tempfile.mkdtemp(prefix="sec-", dir="/tmp")
    try:
        os.chown(shared, OTHER_UID, OTHER_UID)
        squatter = other_user(SQUATTER, f"{shared}/s.sock")
        assert line_of(squatter) == "ready"
        address = _address(f"{shared}/s.sock")
        assert not sockets.reachable_here(address)
        with pytest.raises(PermissionError):
            connect(address, ranks.TOKEN, {})
        squatter.kill()
        assert squatter.communicate()[0] == ""  # it received no connection
    finally:
        shutil.rmtree(shared)


def test_a_socket_that_another_user_listens_on_is_not_used(folder: Path, other_user: Spawn) -> None:
    """The file and the folder are ours, the process is not."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{folder}/s.sock")
        stranger = other_user(
            LISTENER_OF_A_BOUND_SOCKET, str(bound.fileno()), fds=(bound.fileno(),)
        )
        assert line_of(stranger) == "ready"
        assert sockets.reachable_here(_address(f"{folder}/s.sock"))
        with pytest.raises(PermissionError, match=f"belongs to uid {OTHER_UID}"):
            connect(_address(f"{folder}/s.sock"), ranks.TOKEN, {})


@pytest.mark.parametrize("which", ["data", "control"])
def test_a_peer_of_another_user_is_dropped_by_a_unix_socket(
    other_user: Spawn, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # the run's own folder is private
    with ranks.Host(1) as host:
        path = (host.control if which == "control" else host.addresses[0][0]).split(":")[2]
        os.chmod(host.folder, 0o755)
        os.chmod(path, 0o777)
        client = other_user(CLIENT, path, b"x".hex())
        assert line_of(client) == "0"  # not even a refusal
        os.chmod(host.folder, 0o700)


# --- impostors on TCP ---


class Recorder:
    """Relays one TCP connection to a listener, and records both directions."""

    def __init__(self, address: str) -> None:
        self._target = address
        self._listener, self.address = sockets.listen_tcp("127.0.0.1")
        self.recorded: list[bytearray] = [bytearray(), bytearray()]
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    def _relay(self) -> None:
        client, _ = self._listener.accept()
        with client, sockets.dial(self._target) as server:
            back = threading.Thread(target=self._copy, args=(server, client, 1))
            back.start()
            self._copy(client, server, 0)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket, which: int) -> None:
        try:
            while data := source.recv(1 << 16):
                self.recorded[which] += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def finish(self) -> tuple[bytes, bytes]:
        """The bytes of the client and of the listener."""
        self._thread.join(WAIT_S)
        self._listener.close()
        return bytes(self.recorded[0]), bytes(self.recorded[1])


@pytest.fixture
def session(host: ranks.Host) -> tuple[bytes, bytes]:
    """The bytes of an authenticated connection in both directions."""
    recorder = Recorder(host.addresses[0][1])
    connection, welcome = connect(recorder.address, ranks.TOKEN, {"role": "data"})
    assert welcome == {"ranks": [0, 1]}
    connection.send(Kind.SYNC)
    connection.expect(Kind.SYNC, WAIT_S)
    connection.close()
    return recorder.finish()


def test_the_token_never_crosses_a_connection(session: tuple[bytes, bytes]) -> None:
    for data in session:
        assert b"ALCH" in data
        for secret in (ranks.TOKEN, "secret"):
            assert secret.encode() not in data


def test_a_recorded_client_cannot_be_replayed(
    host: ranks.Host, session: tuple[bytes, bytes]
) -> None:
    with Connection(sockets.dial(host.addresses[0][1])) as connection:
        connection.sock.sendall(session[0])
        assert connection.recv(WAIT_S).kind == Kind.CHALLENGE
        refusal = connection.recv(WAIT_S)
        assert (refusal.kind, refusal.body["kind"]) == (Kind.REFUSED, "AuthError")
        with pytest.raises(ConnectionLost):
            connection.recv(WAIT_S)


class Impostor:
    """A listener without the token: gives fixed bytes as its answer, and records its peer."""

    def __init__(self, answer: bytes) -> None:
        self._listener, self.address = sockets.listen_tcp("127.0.0.1")
        self._answer = answer
        self.received = b""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        peer, _ = self._listener.accept()
        with peer, self._listener:
            peer.sendall(self._answer)
            while data := peer.recv(1 << 16):
                self.received += data

    def finish(self) -> bytes:
        self._thread.join(WAIT_S)
        return self.received


def test_a_recorded_listener_cannot_be_replayed(session: tuple[bytes, bytes]) -> None:
    impostor = Impostor(session[1])
    with pytest.raises(Exception, match="does not have the same token"):
        connect(impostor.address, ranks.TOKEN, {"role": "private to the gang"})
    received = impostor.finish()
    assert b"private" not in received  # it learns nothing but a nonce
    assert len(received) < 100


def test_a_listener_cannot_answer_with_the_client_s_own_proof(host: ranks.Host) -> None:
    """It challenges a real listener with the client's nonce, then swaps the sides."""
    listener, address = sockets.listen_tcp("127.0.0.1")
    failures: list[BaseException] = []

    def dial() -> None:
        try:
            connect(address, ranks.TOKEN, {})
        except BaseException as error:
            failures.append(error)

    client = threading.Thread(target=dial)
    client.start()
    victim = Connection(listener.accept()[0])
    nonce = victim.recv(WAIT_S).body["nonce"]
    with listener, victim:
        victim.send(Kind.CHALLENGE, {"nonce": nonce, "proof": nonce})
        client.join(WAIT_S)
    assert "does not have the same token" in str(failures[0])


def _address(path: str) -> str:
    """The address that a gang would publish for a path on this node."""
    with tempfile.TemporaryDirectory(prefix="sec-", dir="/tmp") as folder:
        listener, address = sockets.listen_unix(f"{folder}/s")
        listener.close()
        return address.replace(f"{folder}/s", path)
