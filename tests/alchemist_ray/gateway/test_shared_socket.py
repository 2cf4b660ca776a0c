"""A socket that several threads share, with and without TLS."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from alchemist_ray.gateway.secure_socket import SharedSocket
from alchemist_ray.gateway.server.access import certificate

NBYTES = 5_000_003  # more than the kernel's buffers hold
CONTENT = bytes(range(256)) * (NBYTES // 256 + 1)
WAIT_S = 20.0


@pytest.fixture(params=["tls", "plain"])
def ends(
    request: pytest.FixtureRequest, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SharedSocket, SharedSocket]]:
    """Both ends of a connection."""
    near, far = socket.socketpair()
    if request.param == "tls":
        monkeypatch.setenv("HOME", str(tmp_path))
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(*certificate(None, None))
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        far = server.wrap_socket(far, server_side=True, do_handshake_on_connect=False)
        shaking = threading.Thread(target=far.do_handshake)
        shaking.start()
        near = client.wrap_socket(near)
        shaking.join(WAIT_S)
    one, other = SharedSocket(near), SharedSocket(far)
    for end in (one, other):
        end.settimeout(WAIT_S)
    yield one, other
    one.close()
    other.close()


def read(sock: SharedSocket, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    ready = 0
    while ready < nbytes and (got := sock.recv_into(memoryview(found)[ready:])):
        ready += got
    return bytes(found[:ready])


def test_more_than_the_kernel_buffers_passes_in_both_directions_at_once(
    ends: tuple[SharedSocket, SharedSocket],
) -> None:
    sending = [threading.Thread(target=end.sendall, args=(CONTENT[:NBYTES],)) for end in ends]
    arrived = {}
    receiving = [
        threading.Thread(target=lambda end=end: arrived.update({end: read(end, NBYTES)}))
        for end in ends
    ]
    for thread in (*sending, *receiving):
        thread.start()
    for thread in (*sending, *receiving):
        thread.join(WAIT_S)
    assert [arrived[end] == CONTENT[:NBYTES] for end in ends] == [True, True]


def test_small_messages_time_limits_and_the_end(ends: tuple[SharedSocket, SharedSocket]) -> None:
    one, other = ends
    assert not other.readable(0.01)
    one.sendall(b"abc")
    assert other.readable(WAIT_S)
    assert other.recv(2) == b"ab"
    assert read(other, 1) == b"c"
    other.settimeout(0.05)
    with pytest.raises(TimeoutError, match="did not send data"):
        other.recv(1)
    with pytest.raises(TimeoutError, match="did not accept data"):
        other.sendall(CONTENT)
    one.shutdown(socket.SHUT_RDWR)
    assert other.readable(WAIT_S)
    assert other.recv(1) == b""
    assert other.recv_into(memoryview(bytearray(1))) == 0
