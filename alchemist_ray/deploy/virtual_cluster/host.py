"""The holder of a host's guests: starts them, waits, ends them.

    python -m alchemist_ray.deploy.virtual_cluster.host <cluster's folder>

One process per host (in a Slurm job, a task of one step). It ends its guests when the file `stop`
appears in the cluster's folder, and on SIGTERM of the batch system.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from alchemist_ray.deploy.virtual_cluster import image
from alchemist_ray.deploy.virtual_cluster.guests import (
    Guest,
    Options,
    cells_here,
    domain,
    guests_of,
    settings,
    volume_of,
)
from alchemist_ray.errors import AlchemistError, JobError

CLUSTER, TOKEN, STOP = "cluster.json", "token", "stop"
VIRSH_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.2
UP, FAILED, DOWN = "up", "failed", "down"  # states of a host, in a file of the folder
GUEST_READY, GUEST_FAILED = "alchemist-guest: ready", "alchemist-guest: failed"
KVM = Path("/dev/kvm")
PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
TAIL = 2000  # characters of a guest's console


def has_kvm(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether guests can run on the processor itself, not emulated.

    Where the processor has no virtualization (many a cloud machine) there may be a ``/dev/kvm``,
    and guests begin to boot and then stand still without a word.
    """
    extensions = re.search(r"^flags\s*:.*\b(vmx|svm)\b", cpuinfo.read_text(), re.MULTILINE)
    return extensions is not None and os.access(KVM, os.R_OK | os.W_OK)


class Hypervisor:
    """libvirt on this host, through virsh."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        if shutil.which("virsh") is None:
            raise JobError(
                f"no virsh on {os.uname().nodename}: libvirt starts guests "
                "(Debian: libvirt-clients, libvirt-daemon-system, qemu-system-x86)"
            )

    def _virsh(self, *words: object) -> str:
        done = subprocess.run(
            ["virsh", "--quiet", f"--connect={self._uri}", *map(str, words)],
            capture_output=True, text=True, timeout=VIRSH_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise JobError(f"virsh {words[0]} on {os.uname().nodename} ({self._uri}): {said}")
        return done.stdout

    def names(self) -> set[str]:
        """Return the names of all domains."""
        return set(self._virsh("list", "--all", "--name").split())

    def create(self, definition: Path) -> None:
        """Start a guest, without a permanent definition."""
        self._virsh("create", definition, "--validate")

    def destroy(self, names: Sequence[str]) -> None:
        """End the guests of these that run."""
        for name in self.names().intersection(names):
            with contextlib.suppress(JobError):  # it has ended by itself
                self._virsh("destroy", name)


class Host:
    """This host's part of a cluster; the cluster's folder describes it."""

    def __init__(self, folder: Path, number: int) -> None:
        told = json.loads((folder / CLUSTER).read_text())
        self.options = Options(**told["options"])
        self.limit_s: float = told["limit_s"]
        self.hypervisor = Hypervisor(told["connect"])
        self._shared = folder
        self._number = number
        self._stopped = False
        self._mark = folder / f"host-{number}"
        self._token = (folder / TOKEN).read_text()
        self._own = Path(tempfile.mkdtemp(prefix=f"alchemist-vc-{self.options.name}-"))
        self._own.chmod(0o755)  # QEMU may run as another user; the settings have mode 600
        self.guests: list[Guest] = []

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: end at the next poll."""
        self._stopped = True

    def run(self) -> None:
        """Start the guests, wait, end them; errors are reported in the folder."""
        try:
            self._create()
            self._wait_ready()
            self._tell(UP)
            while not self._ends():
                time.sleep(POLL_INTERVAL_S)
        except (AlchemistError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            self._tell(f"{FAILED}: {os.uname().nodename}: {error}")
            while not self._ends():  # until `up` has read the error
                time.sleep(POLL_INTERVAL_S)
        finally:
            with contextlib.suppress(AlchemistError, subprocess.TimeoutExpired):
                self.hypervisor.destroy([guest.name for guest in self.guests])
            shutil.rmtree(self._own, ignore_errors=True)
            self._tell(DOWN)

    def _ends(self) -> bool:
        return self._stopped or (self._shared / STOP).exists() or not self._shared.exists()

    def _tell(self, state: str) -> None:
        with contextlib.suppress(OSError):
            new = self._mark.with_suffix(".new")
            new.write_text(state)
            new.rename(self._mark)

    def _create(self) -> None:
        options = self.options
        image.check(Path(options.image))
        guests = guests_of(options, self._number, cells_here())
        check_pages(options)
        there = self.hypervisor.names().intersection(guest.name for guest in guests)
        if there:
            raise JobError(
                f"{', '.join(sorted(there))} already running: stop with `alchemist "
                "virtual-cluster down`, or choose another --name"
            )
        for guest in guests:
            config = self._own / f"{guest.name}.conf"
            with open(os.open(config, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(settings(options, guest, self._token))
            make_volume(options, guest)
            definition = self._own / f"{guest.name}.xml"
            definition.write_text(domain(options, guest, self._own))
            self.guests.append(guest)
            self.hypervisor.create(definition)

    def _wait_ready(self) -> None:
        """Wait until all guests report on their consoles that Ray is up."""
        end = time.monotonic() + self.limit_s
        waiting = {guest.name for guest in self.guests}
        while waiting and not self._ends():
            for name in sorted(waiting):
                said = self._console(name)
                if GUEST_FAILED in said:
                    raise JobError(f"guest {name}: {said[-TAIL:]}")
                if GUEST_READY in said:
                    waiting.remove(name)
            if time.monotonic() > end:
                name = min(waiting)
                raise JobError(
                    f"{', '.join(sorted(waiting))} not ready in {self.limit_s:.0f} s (increase "
                    f"--limit, or --emulate them); the console of {name} ends with:\n"
                    f"{self._console(name)[-TAIL:]}"
                )
            time.sleep(POLL_INTERVAL_S)

    def _console(self, name: str) -> str:
        try:
            return (self._own / f"{name}.log").read_text(errors="replace")
        except OSError:
            return ""


def make_volume(options: Options, guest: Guest) -> None:
    """Make a guest's persistent disk if it does not exist: sparse, ext4. Raises `JobError`."""
    if options.volume is None or (path := volume_of(options, guest)).is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    image.make_ext4(path, f"{options.volume_gib}G")


def check_pages(options: Options, pages: Path = PAGES) -> None:
    """Check that this host has huge pages for its guests. Raises `JobError`."""
    if options.emulate or not options.huge_pages:
        return
    wanted = options.guests * options.memory_mib // 2
    free = int(pages.read_text()) if pages.is_file() else 0
    if free < wanted:
        raise JobError(
            f"{os.uname().nodename} has {free} free huge pages of 2 MB, but the guests need "
            f"{wanted}: as root `sysctl vm.nr_hugepages={wanted}`, soon after "
            "boot, before memory is fragmented; or use --no-huge-pages"
        )


def main(folder: str) -> int:
    """Run the holder of this host. Returns the exit code."""
    host = Host(Path(folder), int(os.environ.get("SLURM_NODEID", "0")))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, host.stop)
    host.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
