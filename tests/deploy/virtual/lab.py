"""libvirt and QEMU of a test's own, on a host of `tests.faults.hosts` that no other process sees.

The daemon's files lie in memory file systems of that host's mount namespace, its bridge in the
host's network; all of it is gone with the host's processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alchemist_ray.deploy.virtual_cluster import cluster, image
from tests.deploy.container import images
from tests.faults.hosts import Host, Hosts
from tests.faults.hosts import why_not as why_no_hosts
from tests.support import commands

TOOLS = ("libvirtd", "virsh", "qemu-system-x86_64", "mke2fs", "dpkg-deb", "apt-get")
PACKAGES = (
    "RUNLEVEL=1 apt-get install -y --no-install-recommends qemu-system-x86 libvirt-clients "
    "libvirt-daemon libvirt-daemon-system libvirt-daemon-driver-qemu libxml2-utils busybox-static"
)
GIVEN = "ALCHEMIST_GUEST_IMAGE"
KERNEL = "linux-image-cloud-amd64"
ALCHEMIST = (sys.executable, "-m", "alchemist_ray.cli", "virtual-cluster")
BRIDGE, HERE, NETWORK = "br0", "10.78.0.1", "10.78.0.0/24"
LIBVIRT_S = 20.0
UP_S = 1500.0  # of guests, on a machine that others use too
MODE = ("--no-huge-pages",) if cluster.has_kvm() else ("--emulate",)
QEMU_CONF = """\
user = "root"
group = "root"
security_driver = "none"
cgroup_controllers = [ ]
namespaces = [ ]
stdio_handler = "file"
remember_owner = 0
dynamic_ownership = 0
"""


def why_not() -> str | None:
    """Why no guests can be booted here, or None."""
    missing = [
        tool
        for tool in TOOLS
        if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    ]
    if missing or not image.BUSYBOX.is_file():
        return f"no {', '.join(missing) or image.BUSYBOX} on this machine; as root: {PACKAGES}"
    return why_no_hosts() or images.why_not()


def folder() -> Path:
    """Where guests' images are kept: beside the container's."""
    return images.folder().parent / "virtual"


def guest_image() -> Path:
    """The folder with what guests boot from, made of the container image of this tree.

    `ALCHEMIST_GUEST_IMAGE` names one that is there already.
    """
    if given := os.environ.get(GIVEN):
        return Path(given)
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = folder() / images.digest()
        with contextlib.suppress(Exception):
            image.check(out)
            return out
        for old in folder().glob("????????????????"):
            shutil.rmtree(old)
        image.make(images.image_root(), _kernel(), out)
        return out


def _kernel() -> Path:
    """Debian's kernel for virtual machines, unpacked."""
    unpacked = folder() / "kernel"
    if not (unpacked / "boot").is_dir():
        packages = folder() / "packages"
        packages.mkdir(exist_ok=True)
        packages.chmod(0o777)
        told = subprocess.run(
            ["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        name = next(
            word for word in told.split() if word.startswith("linux-image-") and word != KERNEL
        )
        subprocess.run(
            ["apt-get", "download", "-q", name], cwd=packages, check=True, timeout=300,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        new = folder() / "kernel.new"
        for package in packages.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, new], check=True, timeout=120)
        new.rename(unpacked)
        shutil.rmtree(packages)
    return unpacked


class Lab:
    """A host with libvirt, and the command `alchemist` on it."""

    def __init__(self, host: Host, uri: str, scratch: Path) -> None:
        self.host, self.uri, self.scratch = host, uri, scratch
        self.state = scratch / "state"

    @property
    def environment(self) -> dict[str, str]:
        """Of programs on the host, which join the Ray of the guests."""
        return {
            **self.host.environment(),
            cluster.HOME_VARIABLE: str(self.state),
            "TMPDIR": str(self.scratch),
            "RAY_ADDRESS": "10.78.0.31:6379",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.state / "vc" / cluster.TOKEN),
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        }

    def run(self, *words: Any, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return commands.run(*self.host.enter(*words), limit_s=limit_s, env=self.environment)

    def alchemist(self, *words: Any, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return self.run(*ALCHEMIST, *words, limit_s=limit_s)

    def words(self, name: str = "vc", memory: str = "2G", cpus: int = 1) -> list[str]:
        """The words of `up` for guests of this host."""
        return [
            "up", "--name", name, "--image", str(guest_image()), "--cpus", str(cpus),
            "--memory", memory, *MODE, "--connect", self.uri, "--network", NETWORK,
            "--bridge", BRIDGE, "--limit", str(UP_S),
        ]  # fmt: skip

    def up(self, *more: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.alchemist(*self.words(**options), *more, limit_s=UP_S + 100)

    def join_ray(self) -> None:
        """Have the host join the Ray of the guests, without CPUs."""
        done = self.run(
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=0"),
            *("--address=10.78.0.31:6379", f"--node-ip-address={HERE}"),
            *("--object-store-memory=100000000", "--disable-usage-stats"),
            limit_s=400,
        )
        if done.returncode:
            raise RuntimeError(f"the host cannot join Ray: {done.stdout + done.stderr}")

    def guests(self) -> list[str]:
        return self.host.run("virsh", "-c", self.uri, "list", "--all", "--name").split()


@contextlib.contextmanager
def lab(scratch: Path) -> Iterator[Lab]:
    """A host with libvirt for guests; all of it is gone at the end."""
    with Hosts(1, shared=[scratch]) as hosts, libvirt_on(hosts[0], scratch) as uri:
        yield Lab(hosts[0], uri, scratch)


@contextlib.contextmanager
def libvirt_on(host: Host, scratch: Path) -> Iterator[str]:
    """A libvirtd and a bridge on a host; the URI by which it is reached there."""
    for place in ("/run", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt"):
        host.run("mkdir", "-p", place)
        host.run("mount", "-t", "tmpfs", "tmpfs", place)
    etc = scratch / "etc-libvirt"
    etc.mkdir()
    (etc / "qemu.conf").write_text(QEMU_CONF)
    (etc / "libvirtd.conf").write_text('auth_unix_rw = "none"\nauth_unix_ro = "none"\n')
    host.run("mount", "--bind", etc, "/etc/libvirt")
    host.run("mkdir", "-p", "/run/libvirt", "/run/lock")
    host.run("ip", "link", "add", BRIDGE, "type", "bridge")
    host.run("ip", "addr", "add", f"{HERE}/24", "dev", BRIDGE)
    host.run("ip", "link", "set", BRIDGE, "up")
    with open(scratch / "libvirtd.log", "wb") as log:
        daemon = subprocess.Popen(
            host.enter("/usr/sbin/libvirtd", "-p", "/run/libvirtd.pid"),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=commands.die_with_parent,
            env={**host.environment(), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        )  # fmt: skip
    try:
        end = time.monotonic() + LIBVIRT_S
        while True:
            try:
                host.run("virsh", "-c", "qemu:///system", "list")
                break
            except RuntimeError as error:
                if time.monotonic() > end or daemon.poll() is not None:
                    said = (scratch / "libvirtd.log").read_text()[-3000:]
                    raise RuntimeError(f"libvirtd did not come up: {error}\n{said}") from error
                time.sleep(0.2)
        yield "qemu:///system"
    finally:
        daemon.kill()
        daemon.wait()
