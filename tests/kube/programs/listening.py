"""Runs in a pod: the listening TCP ports there that can be reached from outside."""

import json
from pathlib import Path

LISTEN = "0A"
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
found = set()
for path in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in Path(path).read_text().splitlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        host, port = address.split(":")
        if state == LISTEN and host not in LOOPBACK:
            found.add(int(port, 16))
print(json.dumps(sorted(found)))
