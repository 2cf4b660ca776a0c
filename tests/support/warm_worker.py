"""The program that Ray runs for each worker in tests: it has `warm_workers` fork one."""

import json
import os
import socket
import sys
from contextlib import suppress

SERVER = "ALCHEMIST_TEST_WORKERS"  # variable of a Ray: its server's address, and Ray's own program

if __name__ == "__main__":
    address, program = os.environ[SERVER].split(":")
    words = [program, *sys.argv[1:]]
    if "--runtime-env-hash=0" in words:  # else it may have another interpreter or other packages
        order = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(address)
            socket.send_fds(server, [order], [0, 1, 2])
            sys.exit()
    os.execv(sys.executable, [sys.executable, *words])
