"""A node's interfaces, and connections between nodes in both directions.

A `Listener` listens on a port that the kernel chooses, as gangs do, and sends its name and clock to
each caller. `dial` connects to the other nodes' listeners. Each node dials all others of up to 16
nodes; of more, the neighbours at distances 1, 2, 4, ..., so that its work grows with the logarithm
of their number.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from alchemist_ray.errors import JobError
from alchemist_ray.observe.doctor.finding import BAD, INFO, OK, WARN, Expected, Finding
from alchemist_ray.runtime.cluster.network import address_of, address_towards
from mpi_workers.wire.interfaces import interfaces

ALL_PAIRS = 16
DIAL_TIMEOUT_S = 5.0
SLOW_NAME_S = 2.0
HELLO_NBYTES = 4096
FASTER = 2  # times: an unused network that is this much faster is reported


def speed(name: str) -> int:
    """Return the Mbit/s of an interface, 0 if unknown."""
    try:
        return max(0, int(Path(f"/sys/class/net/{name}/speed").read_text()))
    except (OSError, ValueError):
        return 0


def described(name: str, address: str) -> str:
    """Describe an interface: ``eth0 10.0.0.1, MTU 1500, 10000 Mbit/s``."""
    parts = [f"{name} {address}"]
    with contextlib.suppress(OSError):
        parts.append(f"MTU {Path(f'/sys/class/net/{name}/mtu').read_text().strip()}")
    if mbits := speed(name):
        parts.append(f"{mbits} Mbit/s")
    return ", ".join(parts)


def own_address(expected: Expected, ray_address: str, towards: str) -> str:
    """Return this node's address: of the site's interface, Ray's, or on the route to a peer."""
    if expected.interface:
        with contextlib.suppress(JobError):
            return address_of(expected.interface, interfaces())
    if ray_address:
        return ray_address
    with contextlib.suppress(JobError):
        return address_towards(towards) if towards else "127.0.0.1"
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """Return the interface with an address, or the address itself."""
    return next((name for name, a in interfaces().items() if a == address), address)


def used_interface(expected: Expected, ray_address: str, peers: int) -> Iterator[Finding]:
    """Check the interfaces, and the one that Ray uses."""
    check = "network interface"
    here = interfaces()
    others = {n: a for n, a in here.items() if not a.startswith("127.")}
    all_of_them = "; ".join(described(n, a) for n, a in here.items()) or "none with an address"
    fix = "start Ray there with --node-ip-address (alchemist slurm does, by the site file)"
    wanted = ""
    if expected.interface:
        try:
            wanted = interface_of(address_of(expected.interface, here))
        except JobError as error:
            yield Finding(
                check,
                BAD,
                str(error),
                f"set nodes.interface in the site file {expected.site} to one of them",
            )
            return
    if not ray_address:
        yield Finding(
            check, INFO if not wanted else OK, f"{wanted + ' of ' if wanted else ''}{all_of_them}"
        )
        return
    used = interface_of(ray_address)
    message = f"Ray uses {used} of {all_of_them}"
    quicker = [n for n in others if speed(n) > FASTER * speed(used) > 0]
    if used == ray_address:
        yield Finding(
            check, BAD, f"Ray's address {ray_address} is on no interface: {all_of_them}", fix
        )
    elif ray_address.startswith("127.") and peers > 1:
        yield Finding(check, BAD, f"{message}: no other node can reach it there", fix)
    elif wanted and not any(fnmatch.fnmatchcase(used, p) for p in expected.interface):
        yield Finding(check, BAD, f"{message}; the site {expected.site} requires {wanted}", fix)
    elif quicker:
        yield Finding(check, WARN, f"{message}; {', '.join(quicker)} is faster", fix)
    else:
        yield Finding(check, OK, message)


def own_name(expected: Expected) -> Iterator[Finding]:
    """Check that the node resolves its own name quickly: launchers use names."""
    name, start = socket.gethostname(), time.monotonic()
    check, advice = "host name", f"add {name} to /etc/hosts or to the name server"
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Finding(
            check, WARN, f"{name} cannot be resolved",
            f"{advice}: the launchers srun and hydra use names"
        )  # fmt: skip
        return
    took = time.monotonic() - start
    if took > SLOW_NAME_S:
        yield Finding(
            check,
            WARN,
            f"{name} is {address}, after {took:.1f} s",
            f"{advice}: each start waits for it",
        )
    else:
        yield Finding(check, OK, f"{name} is {address}")


# --- between nodes --------------------------------------------------------------------


class Listener:
    """Listens at this node's address until closed; sends callers its name and clock."""

    def __init__(self, name: str, address: str) -> None:
        self._name = name
        self._socket = socket.create_server((address, 0), backlog=1024)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                caller, _ = self._socket.accept()
                with caller, contextlib.suppress(OSError):
                    caller.settimeout(DIAL_TIMEOUT_S)
                    caller.sendall(json.dumps([self._name, time.time()]).encode() + b"\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._socket.close()


def neighbours(name: str, names: Sequence[str]) -> list[str]:
    """Return the nodes that a node dials."""
    count, own = len(names), names.index(name)
    if count <= ALL_PAIRS:
        return [other for other in names if other != name]
    steps = [1 << k for k in range(count.bit_length()) if 1 << k < count]
    return sorted(
        {names[(own + sign * step) % count] for step in steps for sign in (1, -1)} - {name}
    )


def dial(
    name: str, listeners: Mapping[str, Sequence[Any]], limit_s: float = DIAL_TIMEOUT_S
) -> list[dict[str, Any]]:
    """Connect to the neighbours' listeners.

    Returns
    -------
    list of dict
        For each: its name, `to`; the error, `why` (empty: it answered); of one that answered, the
        seconds that its clock is `ahead` of ours, and their accuracy, `within`.
    """
    names = sorted(listeners)
    wanted = neighbours(name, names)
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(wanted)))) as threads:
        return list(
            threads.map(lambda to: _dial(to, listeners[to][0], listeners[to][1], limit_s), wanted)
        )


def _dial(to: str, host: str, port: int, limit_s: float) -> dict[str, Any]:
    try:
        with socket.create_connection((host, port), limit_s) as connection:
            connection.settimeout(limit_s)
            asked = time.time()
            text = b""
            while not text.endswith(b"\n") and len(text) < HELLO_NBYTES:
                piece = connection.recv(HELLO_NBYTES)
                if not piece:
                    break
                text += piece
            got = time.time()
        who, clock = json.loads(text)
    except TimeoutError:
        return {"to": to, "why": f"no answer from {host}:{port} in {limit_s:g} s"}
    except OSError as error:
        return {"to": to, "why": f"{host}:{port}: {error.strerror or error}"}
    except ValueError:
        return {"to": to, "why": f"another program answers at {host}:{port}"}
    if who != to:
        return {"to": to, "why": f"{who} answers at {host}:{port}: two nodes have one address"}
    return {"to": to, "why": "", "ahead": clock - (asked + got) / 2, "within": (got - asked) / 2}


def node_name() -> str:
    """Return this node's name in Slurm, or its host name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename
