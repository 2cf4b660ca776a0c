"""The relay passes on what is said, but for one number."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from mpi_workers.node.pmi_relay import is_slurms, pass_on


@contextlib.contextmanager
def relayed() -> Iterator[tuple[socket.socket, socket.socket, threading.Thread]]:
    """The rank's end and the server's, and the relay between them."""
    rank, near = socket.socketpair()
    server, far = socket.socketpair()
    relay = threading.Thread(target=pass_on, args=(near, far), daemon=True)
    relay.start()
    for end in (rank, server):
        end.settimeout(5)
    with rank, near, server, far:
        yield rank, server, relay
        rank.close()
        relay.join(5)


def test_all_is_passed_on_but_the_length_of_values() -> None:
    with relayed() as (rank, server, _):
        rank.sendall(b"cmd=get_maxes\n")
        assert server.recv(1000) == b"cmd=get_maxes\n"
        server.sendall(b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n")
        told = rank.recv(1000)
        assert told == b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=900\n"
        value = b"cmd=get_result rc=0 value=vallen_max=1024\n"
        server.sendall(value)
        assert rank.recv(1000) == value


@pytest.mark.parametrize("first", ["rank", "server"])
def test_it_ends_with_either(first: str) -> None:
    with relayed() as (rank, server, relay):
        rank.sendall(b"cmd=abort exitcode=3\n")
        (rank if first == "rank" else server).close()
        if first == "rank":
            assert server.recv(1000) == b"cmd=abort exitcode=3\n"  # the last words are heard
        relay.join(5)
        assert not relay.is_alive()


def test_only_slurms_pmi_is_relayed() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3"}
    assert is_slurms({**step, "PMI_FD": "5", "PMI_JOBID": "7.3"})
    assert not is_slurms({**step, "PMI_FD": "5"})  # Hydra's or our own, within a step
    assert not is_slurms({**step, "PMI_FD": "5", "PMI_JOBID": "0"})
    assert not is_slurms({"PMI_FD": "5", "PMI_JOBID": "7.3"})
    assert not is_slurms(step)
