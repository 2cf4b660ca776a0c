"""An end of a channel reads what has come, whatever it came with."""

from __future__ import annotations

import socket

from mpi_workers.rank.channels import BEGIN, _Peer
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Kind, encode


def test_a_begin_that_came_with_the_welcome_is_seen() -> None:
    here, there = socket.socketpair()
    with there, Connection(here) as connection:
        there.sendall(encode(Kind.WELCOME, {}) + BEGIN)
        connection.recv()
        assert _Peer(0, connection, begun=False).begun
