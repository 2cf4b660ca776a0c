"""TLS over a socket with few system calls, and a socket that several threads share."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from alchemist_ray.gateway.secure_socket import (
    LARGE_STEP_NBYTES,
    SMALL_STEP_NBYTES,
    SharedSocket,
    TlsSocket,
)
from alchemist_ray.gateway.server.certificates import certificate

NBYTES = 5_000_003  # more than the kernel's buffers hold
CONTENT = bytes(range(256)) * (NBYTES // 256 + 1)
WAIT_S = 20.0


@pytest.fixture(scope="module")
def server_context(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        files = certificate(None, None)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context


def client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.fixture(params=[SMALL_STEP_NBYTES, LARGE_STEP_NBYTES])
def ends(
    request: pytest.FixtureRequest, server_context: ssl.SSLContext
) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), WAIT_S)
        far, _ = listener.accept()
    far.settimeout(WAIT_S)
    server = TlsSocket(far, server_context, step_nbytes=request.param)
    shaking = threading.Thread(target=server.do_handshake)
    shaking.start()
    client = TlsSocket(near, client_context(), server_hostname="x", step_nbytes=request.param)
    client.do_handshake()
    shaking.join(WAIT_S)
    with client, server:
        yield client, server


def read(sock: TlsSocket | SharedSocket, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    ready = 0
    while ready < nbytes and (got := sock.recv_into(memoryview(found)[ready:])):
        ready += got
    return bytes(found[:ready])


def test_large_and_small_messages_pass_in_both_directions(
    ends: tuple[TlsSocket, TlsSocket],
) -> None:
    for sender, receiver in (ends, ends[::-1]):
        sending = threading.Thread(target=sender.sendall, args=(CONTENT[:NBYTES],))
        sending.start()
        assert read(receiver, NBYTES) == CONTENT[:NBYTES]
        sending.join(WAIT_S)
        sender.sendall(b"abc")
        assert receiver.recv(2) == b"ab"
        assert receiver.has_received
        assert receiver.recv(2) == b"c"
        assert not receiver.has_received


def test_other_implementations_of_tls_understand_it(server_context: ssl.SSLContext) -> None:
    near, far = socket.socketpair()
    near.settimeout(WAIT_S)
    answers = []

    def serve() -> None:
        with server_context.wrap_socket(far, server_side=True) as plain:
            answers.append(plain.recv(100))
            plain.sendall(b"heard")

    serving = threading.Thread(target=serve)
    serving.start()
    with TlsSocket(near, client_context(), server_hostname="x") as sock:
        sock.do_handshake()
        sock.sendall(b"said")
        assert read(sock, 9) == b"heard"  # then the end
        assert sock.recv(1) == b""
    serving.join(WAIT_S)
    assert answers == [b"said"]


def test_a_time_limit_holds_and_an_end_without_notice_is_an_end(
    ends: tuple[TlsSocket, TlsSocket],
) -> None:
    client, server = ends
    server.settimeout(0.05)
    with pytest.raises(TimeoutError):
        server.recv(1)
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    assert server.recv_into(memoryview(bytearray(1))) == 0


def test_a_socket_that_does_not_block_says_when_it_would(
    ends: tuple[TlsSocket, TlsSocket],
) -> None:
    client, server = ends
    client.setblocking(False)
    with pytest.raises(ssl.SSLWantReadError):
        client.recv(1)
    taken = 0
    with contextlib.suppress(ssl.SSLWantWriteError):
        while taken < 10 * NBYTES:
            taken += client.send(CONTENT[: 1 << 20])
    assert 0 < taken < 10 * NBYTES
    received = 0
    flushed = False
    while received < taken:
        received += len(server.recv(1 << 20))
        with contextlib.suppress(ssl.SSLWantWriteError):
            flushed = client.send(b"") == 0
    assert flushed
    assert received == taken


@pytest.mark.parametrize("tls", [True, False])
def test_a_shared_socket_sends_more_than_the_kernel_buffers(
    ends: tuple[TlsSocket, TlsSocket], tls: bool
) -> None:
    near, far = ends if tls else socket.socketpair()
    one, other = SharedSocket(near), SharedSocket(far)
    one.settimeout(WAIT_S)
    other.settimeout(WAIT_S)
    sending = threading.Thread(target=one.sendall, args=(CONTENT[:NBYTES],))
    sending.start()
    assert other.readable(WAIT_S)
    assert read(other, NBYTES) == CONTENT[:NBYTES]
    sending.join(WAIT_S)
    assert not other.readable(0.01)
    one.close()
    assert other.readable(WAIT_S)
    assert other.recv(1) == b""
    other.close()
