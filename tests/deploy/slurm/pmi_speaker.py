"""Tells the other rank of a step of two a value as long as its PMI-1 allows, as MPICH does.

python -m tests.deploy.slurm.pmi_speaker [relay]    prints whether the other's value came whole
"""

from __future__ import annotations

import os
import socket
import sys

from mpi_workers.node import pmi_relay


def main() -> None:
    if sys.argv[1:] == ["relay"]:
        pmi_relay.start_if_needed()
    pmi = socket.socket(fileno=int(os.environ["PMI_FD"]))
    pmi.settimeout(5)

    def ask(request: str) -> dict[str, str]:
        pmi.sendall(f"{request}\n".encode())
        return dict(word.split("=", 1) for word in pmi.recv(1 << 16).decode().split())

    rank = int(os.environ["PMI_RANK"])
    ask("cmd=init pmi_version=1 pmi_subversion=1")
    longest = int(ask("cmd=get_maxes")["vallen_max"]) - 2  # what MPICH leaves free
    name = ask("cmd=get_my_kvsname")["kvsname"]
    ask(f"cmd=put kvsname={name} key=-allgather-1-{rank}-seg-1/9 value={'A' * longest}")
    ask("cmd=barrier_in")
    told = ask(f"cmd=get kvsname={name} key=-allgather-1-{1 - rank}-seg-1/9")
    sys.stdout.write(f"whole={told.get('value') == 'A' * longest}\n")
    sys.stdout.flush()
    ask("cmd=finalize")


if __name__ == "__main__":
    main()
