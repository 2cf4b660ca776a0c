"""Runs in a pod: which of these ports of another pod let it in."""

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

address, ports = sys.argv[1], list(map(int, sys.argv[2:]))


def opens(port):
    try:
        socket.create_connection((address, port), timeout=4).close()
    except OSError:
        return False
    return True


with ThreadPoolExecutor(len(ports)) as threads:
    answers = list(threads.map(opens, ports))
print(json.dumps([port for port, answer in zip(ports, answers, strict=True) if answer]))
