"""A corner of this machine for a Kubernetes node: its own network, mounts and processes.

Nothing listens outside, names cannot collide with those of other runs, and all of it is gone
with its first process, which dies with this one, however this one ends. What lies in no
namespace (cgroups, a folder of files) is removed by `Sandbox.close`.

The machine is told to be larger inside (`CPUS`, `MEMORY`): Kubernetes schedules what is asked
for, not what is used, and the manifests ask for more than tests use. The same module is the first
process inside.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import commands

NAMESPACES = ("--net", "--mount", "--pid")
CPUS = 16
MEMORY = 64 << 30  # bytes
NODE_IP = "192.168.77.1"
CGROUPS = Path("/sys/fs/cgroup")
END_S = 20.0
# The kubelet writes these, and they are the whole machine's.
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
PRIVATE = ("/run", "/var/log", "/var/lib/cni", "/var/lib/kubelet")  # all of them write there


class Sandbox:
    """Namespaces, a folder, cgroups, and the daemons that were started in them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kube-"))
        self.folder.chmod(0o755)
        self.logs = self.folder / "logs"
        self.logs.mkdir()
        self.cgroup = f"/{self.folder.name}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        made = [make_cgroup(tree, self.folder.name) for tree in hierarchies()]
        self.cgroups = [path for path in made if path is not None]
        for top in self.cgroups:
            make_cgroup(top, "kubepods")  # or the kubelet would make it, for more CPUs than are
        self._unshare: subprocess.Popen[str] | None = None
        apart = [*NAMESPACES, "--mount-proc", "--propagation", "private"]
        try:
            self._unshare, self._init = commands.unshared(apart, "tests.kube.sandbox", self.folder)
        except RuntimeError:
            self.close()
            raise

    def enter(self, *command: Any) -> list[str]:
        """The command line that runs a command inside."""
        words = ["nsenter", "-t", self._init, *NAMESPACES, f"--wd={self.folder}", "--", *command]
        return list(map(str, words))

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "KUBE", "TMPDIR"))}
        return {**kept, "HOME": str(self.folder), **more}

    def run(self, *command: Any, limit_s: float = 60.0, **options: Any) -> str:
        """The output of a command inside, see `commands.output`."""
        env = self.environment()
        return commands.output(*self.enter(*command), env=env, limit_s=limit_s, **options)

    def start(self, name: str, *command: Any, **environment: str) -> None:
        """Start a daemon inside; what it says goes into a file of its name."""
        with open(self.logs / name, "ab") as log:
            self._daemons[name] = subprocess.Popen(
                self.enter(*command),
                env=self.environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=commands.die_with_parent,
            )

    def stop(self, name: str) -> None:
        """End a daemon, which is the child of the nsenter that we started."""
        daemon = self._daemons.pop(name)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in commands.children(daemon.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(END_S)
                return

    def check(self) -> None:
        """Raises `RuntimeError` if a daemon has ended by itself, with its last words."""
        for name, daemon in self._daemons.items():
            if daemon.poll() is not None:
                raise RuntimeError(f"{name} ended ({daemon.returncode}):\n{self.said(name)}")

    def said(self, name: str, characters: int = 3000) -> str:
        """The end of what a daemon has said."""
        return (self.logs / name).read_text(errors="replace")[-characters:]

    def close(self) -> None:
        """End every process inside, and remove what lies outside the namespaces."""
        if self._unshare is not None:
            self._unshare.kill()
            self._unshare.communicate()
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        deadline = time.monotonic() + END_S
        while (left := self.left()) and time.monotonic() < deadline:
            for top in self.cgroups:
                _remove_cgroup(top)
            shutil.rmtree(self.folder, ignore_errors=True)
            time.sleep(0.1)
        if left:
            raise RuntimeError("left behind: " + ", ".join(left))

    def left(self) -> list[str]:
        """Its leftovers on this machine."""
        found = [str(path) for path in (self.folder, *self.cgroups) if path.exists()]
        found += [f"process {pid}" for pid in _using(self.folder)]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return found + [f"mount {line}" for line in mounts if f"{self.folder}/" in line]


def _using(folder: Path) -> list[int]:
    """Processes that name a folder, or see it mounted somewhere."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes()
                if str(folder).encode() in words + (process / "mountinfo").read_bytes():
                    found.append(int(process.name))
    return found


# --- cgroups ----------------------------------------------------------------------------


def hierarchies() -> list[Path]:
    """Where cgroups can be made: every controller's tree (version 1), or the one tree."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in sorted(CGROUPS.iterdir()) if path.is_dir() and not path.is_symlink()]


def make_cgroup(parent: Path, name: str) -> Path | None:
    """A cgroup whose children have all controllers; None where there are none to have."""
    path = parent / name
    try:
        path.mkdir()
        for file in ("cpuset.cpus", "cpuset.mems"):  # version 1 starts with none
            if (path / file).exists() and (parent / file).exists():
                (path / file).write_text((parent / file).read_text())
        if (CGROUPS / "cgroup.controllers").exists():
            names = (path / "cgroup.controllers").read_text().split()
            (path / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))
    except OSError:
        return None
    return path


def _remove_cgroup(top: Path) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


# --- the first process inside -----------------------------------------------------------


def _mount(*words: Any) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, stderr=subprocess.STDOUT)


def _decoy(folder: Path, target: str, text: str) -> None:
    """Put a file of ours in a file's place."""
    path = folder / "decoys" / target.strip("/").replace("/", "_")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    _mount("--bind", path, target)


def _larger(folder: Path) -> None:
    """Tell who asks (the kubelet does) that there are `CPUS` and `MEMORY` here."""
    total = re.sub(
        r"MemTotal: +\d+", f"MemTotal: {MEMORY >> 10}", Path("/proc/meminfo").read_text()
    )
    _decoy(folder, "/proc/meminfo", total)
    _decoy(folder, "/sys/devices/system/cpu/online", f"0-{CPUS - 1}\n")
    nodes = Path("/sys/devices/system/node")
    if nodes.is_dir():
        _mount("-t", "tmpfs", "tmpfs", nodes)
        (nodes / "node0").mkdir()
        (nodes / "node0" / "meminfo").write_text(f"Node 0 MemTotal: {MEMORY >> 10} kB\n")
        (nodes / "node0" / "distance").write_text("10\n")
        (nodes / "node0" / "hugepages").mkdir()
        for number in range(CPUS):
            topology = nodes / "node0" / f"cpu{number}" / "topology"
            topology.mkdir(parents=True)
            (topology / "core_id").write_text(f"{number}\n")
            (topology / "physical_package_id").write_text("0\n")


def _furnish(folder: Path) -> None:
    _mount("--make-rshared", "/")
    kept = folder / "cgroups"
    kept.mkdir()
    _mount("--rbind", CGROUPS, kept)
    _mount("-t", "sysfs", "sysfs", "/sys")  # of this network
    _mount("--rbind", kept, CGROUPS)
    _mount("--make-rprivate", kept)
    subprocess.run(["umount", "--recursive", str(kept)], check=True)
    for name, value in KERNEL.items():
        if Path("/proc/sys", name).exists():
            _decoy(folder, f"/proc/sys/{name}", f"{value}\n")
    _larger(folder)
    for place in PRIVATE:
        Path(place).mkdir(parents=True, exist_ok=True)
        _mount("-t", "tmpfs", "tmpfs", place)
    for words in (
        "link set lo up",
        "link add node0 type bridge",
        f"addr add {NODE_IP}/24 dev node0",
        "link set node0 up",
        "route add default dev node0",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")


if __name__ == "__main__":
    try:
        _furnish(Path(sys.argv[1]))
    except Exception as error:
        sys.exit(print(repr(error)))
    commands.rest()
