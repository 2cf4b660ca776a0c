"""The requirements of a real Kubernetes on this machine, all in one report."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.kube import binaries
from tests.support import commands

# Program: the package of Debian's that has it.
PROGRAMS = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables-restore": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
}
PLUGIN = Path("/usr/lib/cni/ptp")
INSTALL = "RUNLEVEL=1 apt-get install -y --no-install-recommends"


def missing() -> list[str]:
    """The missing requirements, as sentences."""
    said = []
    if os.geteuid() != 0:
        said.append("root, for namespaces and cgroups")
    packages = {package for name, package in PROGRAMS.items() if not shutil.which(name)}
    if not PLUGIN.exists():
        packages.add("containernetworking-plugins")
    if packages:
        said.append(f"Debian's packages: {INSTALL} {' '.join(sorted(packages))}")
    unbuilt = [part.name for part in binaries.ALL if not part.there]
    if unbuilt and not shutil.which("go"):
        said.append(
            f"Go 1.25 or later, to build {', '.join(unbuilt)} once (some 20 minutes, and 2.2 GB "
            f"of memory; kept in {binaries.CACHE})"
        )
    if "controlplane" in unbuilt and not shutil.which("gcc"):
        said.append("gcc, which Go asks for parts of Kubernetes")
    if not said:
        alone = ("unshare", "--net", "--mount", "--pid", "--fork")
        probe = commands.run(*alone, "mount", "-t", "sysfs", "sysfs", "/sys")
        if probe.returncode:
            said.append(f"leave to make namespaces ({probe.stderr.strip()})")
    return said
