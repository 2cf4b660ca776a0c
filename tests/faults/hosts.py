"""Several hosts on one machine: namespaces of their own, joined by a bridge.

Each host has its network, hostname, IPC, processes and mounts; its /dev/shm and /tmp
are its own, so that nothing but the network joins it to the others. The bridge lies in
a network namespace too: nothing is seen on the machine itself, names cannot collide
with those of other runs, and all of it is gone with the processes that hold it.

    with Hosts(2) as hosts:
        hosts.start_ray(cpus=2)
        hosts[0].call("tests.faults.inside:somewhat", 1, 2, limit_s=20)
        hosts[1].cut()

Needs root. The same module is the first process of every host.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support import commands
from tests.support.commands import ROOT

NETWORK = "10.77.0"
GCS_PORT = 6379
PROBE = "8.8.8.8"  # Ray derives the host's own address from the route to it; nothing is sent
NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
FIRST = "tests.faults.hosts"
TOOLS = ("bash", "ip", "kill", "mount", "nsenter", "ps", "unshare")


def why_not() -> str | None:
    """Why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"no {', '.join(missing)} on this machine"
    probe = commands.run("unshare", *NAMESPACES, "--fork", "mount", "-t", "sysfs", "sysfs", "/sys")
    return f"no namespaces: {probe.stderr.strip()}" if probe.returncode else None


class Host:
    """One host: a process that holds namespaces, and a port of the bridge."""

    def __init__(self, number: int, name: str, switch: int, shared: Sequence[Path] = ()) -> None:
        self.ip = f"{NETWORK}.{number + 1}"
        self.name = name
        self._switch = switch
        self._port = f"port{number}"
        needed = [ROOT, sys.prefix, sys.base_prefix, *shared]
        self._unshare, self.init = commands.unshared(
            [*NAMESPACES, "--mount-proc"], FIRST, name, *needed, stderr=subprocess.DEVNULL
        )
        self._link("add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self.init)
        self._link("set", self._port, "master", "bridge", "up")
        for command in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{self.ip}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["route", "add", PROBE, "dev", "eth0"],
        ):
            self.run("ip", *command)
        self._inside: Inside | None = None

    def _link(self, *words: Any) -> None:
        commands.output("nsenter", "-t", self._switch, "--net", "--", "ip", "link", *words)

    def cut(self) -> None:
        """Disconnect the host: packets are lost without an error."""
        self._link("set", self._port, "nomaster")

    def mend(self) -> None:
        """Connect the host again."""
        self._link("set", self._port, "master", "bridge")

    def kill(self) -> None:
        """Kill all processes on it at once, as a loss of power would."""
        if self._unshare.poll() is not None:
            return
        with contextlib.suppress(RuntimeError):
            self.cut()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self._unshare.communicate()

    def enter(self, *command: Any) -> list[str]:
        """The command line that runs a command on this host."""
        head = ["nsenter", "-t", self.init, *NAMESPACES, f"--wd={ROOT}", "--", *command]
        return list(map(str, head))

    def run(self, *command: Any, limit_s: float = 60.0) -> str:
        """Run a command here and return its output. Raises `RuntimeError` if it fails."""
        return commands.output(*self.enter(*command), env=self.environment(), limit_s=limit_s)

    def wait_for_port(self, port: int) -> None:
        """Wait until something listens at this port of the first host."""
        look = f"until (: < /dev/tcp/{NETWORK}.1/{port}) 2>/dev/null; do sleep 0.1; done"
        self.run("bash", "-c", look)

    def environment(self) -> dict[str, str]:
        dropped = ("TMPDIR", "RAY_ADDRESS")
        return {k: v for k, v in os.environ.items() if k not in dropped} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": str(ROOT),
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_ADDRESS": f"{NETWORK}.1:{GCS_PORT}",
        }

    def pids(self, *words: str) -> list[int]:
        """Return the processes (by the host's own ids) with all these words in the command line."""
        found = []
        for line in self.run("ps", "-ww", "-eo", "pid=,stat=,args=").splitlines():
            pid, state, command = line.split(None, 2)
            if state[0] != "Z" and all(word in command for word in words):
                found.append(int(pid))
        return found

    def signal(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process by its id on this host."""
        self.run("kill", f"-{number}", pid)

    def begin(self, function: str, *arguments: Any) -> None:
        """Start a call of ``module:function`` in the host's long-lived process."""
        if self._inside is None:
            self._inside = Inside(self)
        self._inside.ask(function, arguments)

    def result(self, limit_s: float) -> Any:
        """Return its result. Raises `AssertionError` if it raised or took too long."""
        assert self._inside is not None
        try:
            return self._inside.answer(limit_s)
        except TimeoutError:
            self.leave()
            raise AssertionError(f"no answer from host {self.name} in {limit_s} s") from None

    def call(self, function: str, *arguments: Any, limit_s: float = 20.0) -> Any:
        """Call `begin`, then `result`."""
        self.begin(function, *arguments)
        return self.result(limit_s)

    def leave(self) -> None:
        """End the process that answers calls."""
        if self._inside is not None:
            self._inside.end()
            self._inside = None


class Inside:
    """A Python process on a host that calls functions: JSON lines in, JSON lines out."""

    def __init__(self, host: Host) -> None:
        self._process = subprocess.Popen(
            host.enter(sys.executable, "-m", "tests.faults.inside"), env=host.environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=commands.die_with_parent,
        )  # fmt: skip

    def ask(self, function: str, arguments: tuple[Any, ...]) -> None:
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self, limit_s: float) -> Any:
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        in_time = timer.is_alive()
        timer.cancel()
        if not line:
            if not in_time:
                raise TimeoutError
            raise AssertionError("the process on the host is gone; what it said is above")
        outcome = json.loads(line)
        if "error" in outcome:
            raise AssertionError(outcome["error"])
        return outcome["value"]

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Hosts(commands.System):
    """Context manager: `count` hosts on their own bridge, with the folders `shared` on all."""

    def __init__(self, count: int, shared: Sequence[Path] = ()) -> None:
        self._count = count
        self._shared = shared
        self._hosts: list[Host] = []
        self._switch: tuple[subprocess.Popen[str], int] | None = None

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def start(self) -> None:
        """Make the bridge and the hosts."""
        mark = uuid.uuid4().hex[:6]
        self._switch = _, switch = commands.unshared(["--net"], FIRST)
        inside = ["nsenter", "-t", switch, "--net", "--", "ip", "link"]
        commands.output(*inside, "add", "bridge", "type", "bridge")
        commands.output(*inside, "set", "bridge", "up")
        for number in range(self._count):
            name = f"host{number + 1}-{mark}"
            self._hosts.append(Host(number, name, switch, self._shared))

    def close(self) -> None:
        """End every process on every host; the network ends with them."""
        for host in self._hosts:
            host.kill()
            host.leave()
        if self._switch is not None:
            self._switch[0].kill()
            self._switch[0].communicate()

    def start_ray(self, cpus: Sequence[int], store_bytes: int = 200_000_000) -> None:
        """A Ray cluster over the first hosts, with this many CPUs each; the first one is its head.

        Ray counts a host that does not answer as lost after 15 s (by default, 65 s).
        """
        head = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]

        def start(number: int) -> None:
            host = self._hosts[number]
            role = [f"--address={NETWORK}.1:{GCS_PORT}"] if number else head
            size = [f"--num-cpus={cpus[number]}", f"--object-store-memory={store_bytes}"]
            where = f"--node-ip-address={host.ip}"
            if number:
                host.wait_for_port(GCS_PORT)
            host.run("ray", "start", *role, where, *size, "--disable-usage-stats")

        with ThreadPoolExecutor() as threads:
            list(threads.map(start, range(len(cpus))))


# --- the first process of a host ------------------------------------------------------


def _furnish(name: str, *needed: str) -> None:
    """Give this host a name, its own /dev/shm, /tmp and /sys, and the folders it needs in /tmp."""
    socket.sethostname(name)
    kept = {path: os.open(path, os.O_RDONLY) for path in needed if path.startswith("/tmp/")}
    for place in ("/dev/shm", "/tmp"):
        commands.output("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", place)
    for path, fd in kept.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        # The descriptor itself: mount would follow the link into the new /tmp.
        source = f"/proc/{os.getpid()}/fd/{fd}"
        commands.output("mount", "--no-canonicalize", "--bind", source, path)
        os.close(fd)
    # Name resolution fails at once.
    commands.output("mount", "--bind", "/dev/null", "/etc/resolv.conf")
    # UCX looks for network devices there: it must see this namespace's, not the machine's.
    commands.output("mount", "-t", "sysfs", "sysfs", "/sys")


if __name__ == "__main__":
    if sys.argv[1:]:
        try:
            _furnish(*sys.argv[1:])
        except Exception as error:
            sys.exit(print(repr(error)))
    commands.rest()
