"""Start and end of a virtual cluster, on the hosts of a Slurm job or on this machine.

    python -m alchemist_ray.deploy.virtual_cluster.cluster <cluster's folder>

This program holds the guests of its host: starts them, waits, ends them. One process per host (in a
Slurm job, a task of one step). It ends its guests when the file `stop` appears in the cluster's
folder, and on SIGTERM of the batch system.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from alchemist_ray.cluster import batch_job
from alchemist_ray.deploy.slurm import allocation
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
from alchemist_ray.launchers.srun import srun_command
from alchemist_ray.private_files import write_private

HOME_VARIABLE = "ALCHEMIST_VIRTUAL"
HOME = "~/.alchemist/virtual"
MODULE = "alchemist_ray.deploy.virtual_cluster.cluster"
POLL_INTERVAL_S = 0.2
END_S = 60.0
START_S = 30.0  # for the start of a step's tasks, in addition to the guests' limit
LOG = "hosts.log"
KEEPER = "keeper"  # file with host and process id of the holder of the guests, or of its step
CLUSTER, TOKEN, STOP = "cluster.json", "token", "stop"
VIRSH_TIMEOUT_S = 60.0
UP, FAILED, DOWN = "up", "failed", "down"  # states of a host, in a file of the folder
GUEST_READY, GUEST_FAILED = "alchemist-guest: ready", "alchemist-guest: failed"
KVM = Path("/dev/kvm")
PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
TAIL_CHARACTERS = 2000  # characters of a guest's console


def folder_of(name: str) -> Path:
    """Return a cluster's folder, shared by its hosts: settings, token, state of each host."""
    home = os.environ.get(HOME_VARIABLE) or HOME
    return Path(home).expanduser() / name


def hosts() -> list[str]:
    """Return the nodes of this Slurm job; an empty list outside a job."""
    if batch_job.job_id(os.environ) is None:
        return []
    job = allocation.current(os.environ)
    if not job.uses_srun:
        raise JobError(
            f"job {job.job} belongs to PBS, but only srun starts hosts; on one host, unset "
            f"PBS_JOBID"
        )
    return [node.name for node in job.nodes]


def up(options: Options, connect: str, limit_s: float, join: str | None = None) -> Path:
    """Start the guests, with Ray in them.

    Parameters
    ----------
    options : Options
    connect : str
        URI of libvirt.
    limit_s : float
    join : str, optional
        A running cluster whose Ray these guests join. Default: a Ray of their own.

    Returns
    -------
    Path
        The cluster's folder; `token` in it is Ray's.

    Raises
    ------
    JobError
        If they are not ready in `limit_s`; they have been removed then. If `join` does not exist,
        or another cluster on the bridge has these addresses.
    """
    names = hosts()
    options = replace(options, hosts=max(1, len(names)))
    token = secrets.token_hex(32).encode()
    if join is not None:
        options = replace(options, head=options_of(join).ray_address)
        token = (folder_of(join) / TOKEN).read_bytes()
    folder = folder_of(options.name)
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise JobError(
            f"there is a cluster {options.name!r} already ({folder}): `alchemist virtual-cluster "
            f"down --name {options.name}` ends it"
        ) from None
    try:
        _check_addresses(options)
        write_private(folder / TOKEN, token)
        keeper = _start(folder, options, connect, limit_s, names)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise JobError(f"the process that runs the guests cannot start: {error}") from None
        raise
    try:
        _wait_up(folder, options, keeper, limit_s + START_S)
    except BaseException:
        down(options.name)
        raise
    return folder


def _check_addresses(options: Options) -> None:
    for path in sorted(folder_of("").glob(f"*/{CLUSTER}")):
        other = options_of(path.parent.name)
        if other.bridge == options.bridge and (shared := other.addresses & options.addresses):
            raise JobError(
                f"{min(shared)} belongs to a guest of cluster {other.name!r}: choose another "
                "--first"
            )


def _start(
    folder: Path, options: Options, connect: str, limit_s: float, names: list[str]
) -> subprocess.Popen[bytes]:
    about = {"options": asdict(options), "connect": connect, "limit_s": limit_s, "hosts": names}
    (folder / CLUSTER).write_text(json.dumps(about, indent=1) + "\n")
    command = [sys.executable, "-m", MODULE, str(folder)]
    if names:
        command = [
            *srun_command(os.environ), "--overlap", "--mpi=none", "--quiet", "--kill-on-bad-exit=0",
            f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1",
            f"--nodelist={','.join(names)}", "--input=none", "--job-name=alchemist-guests",
            *command,
        ]  # fmt: skip
    with open(folder / LOG, "wb") as log:
        keeper = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    (folder / KEEPER).write_text(f"{os.uname().nodename} {keeper.pid}\n")
    return keeper


def _wait_up(
    folder: Path, options: Options, keeper: subprocess.Popen[bytes], limit_s: float
) -> None:
    end = time.monotonic() + limit_s
    while True:
        states = [_text(folder / f"host-{number}") for number in range(options.hosts)]
        for state in states:
            if state.startswith(FAILED):
                raise JobError(f"the guests did not start{state.removeprefix(FAILED)}")
        late = [number for number, state in enumerate(states) if state != UP]
        if not late:
            return
        if keeper.poll() is not None:
            said = _text(folder / LOG).strip()[-1500:]
            raise JobError(f"the process that runs the guests ended ({keeper.returncode}): {said}")
        if time.monotonic() > end:
            raise JobError(f"hosts {late} did not start their guests within {limit_s:.0f} s")
        time.sleep(POLL_INTERVAL_S)


def _text(path: Path) -> str:
    """The state of a host, or the console of a guest; empty until there is one."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def down(name: str) -> None:
    """End a cluster's guests on all hosts, and remove its folder.

    Raises
    ------
    JobError
        If it does not exist, or a host does not report the end of its guests.
    """
    folder, about = folder_of(name), _about(name)
    options = Options(**about["options"])
    (folder / STOP).touch()
    end = time.monotonic() + END_S
    runs = True
    while left := [n for n in range(options.hosts) if _text(folder / f"host-{n}") != DOWN]:
        if not runs or time.monotonic() > end:
            break
        time.sleep(POLL_INTERVAL_S)
        runs = _keeper_runs(folder)  # once more after its end: for what it wrote last
    if left:  # the holder of the guests was killed
        names = [options.hostname(n) for n in range(options.hosts * options.guests)]
        with contextlib.suppress(JobError, subprocess.TimeoutExpired):
            destroy(about["connect"], names)
        if about["hosts"]:
            raise JobError(
                f"hosts {', '.join(about['hosts'][n] for n in left)} do not answer: `virsh list` "
                f"there shows whether guests {name}-* remain. Remove {folder} afterwards"
            )
    shutil.rmtree(folder, ignore_errors=True)


def options_of(name: str) -> Options:
    """Return what a cluster was started with. Raises `JobError` if it does not exist."""
    return Options(**_about(name)["options"])


def _about(name: str) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((folder_of(name) / CLUSTER).read_text())
    except OSError:
        raise JobError(
            f"there is no cluster {name!r} ({folder_of(name)}): `alchemist virtual-cluster up` "
            "starts one"
        ) from None
    return about


def _keeper_runs(folder: Path) -> bool:
    """Return whether the holder of the guests, or its step, may still run."""
    try:
        name, pid = (folder / KEEPER).read_text().split()
        if name != os.uname().nodename:
            return True  # unknown here: wait for the time limit
        keeper = psutil.Process(int(pid))
        return str(folder) in keeper.cmdline() and keeper.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, psutil.Error):
        return False


def to_join(options: Options, folder: Path) -> str:
    """Return the commands to use the cluster."""
    return (
        f"  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={folder / TOKEN}\n"
        "  export RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor  # 3.11.x in the guests and here\n"
        f"  ray start --address={options.ray_address} --num-cpus=0\n"
        "  python app.py      runs here, with its ranks in the guests\n"
        f"  alchemist virtual-cluster down --name {options.name}\n"
    )


# --- on a host ---


def has_kvm(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether guests can run on the processor itself, not emulated.

    A machine whose processor has no virtualization (many cloud machines) may still have
    ``/dev/kvm``: its guests begin to boot, and hang without an error.
    """
    extensions = re.search(r"^flags\s*:.*\b(vmx|svm)\b", cpuinfo.read_text(), re.MULTILINE)
    return extensions is not None and os.access(KVM, os.R_OK | os.W_OK)


def virsh(uri: str, *words: object) -> str:
    """Run a command of libvirt on this host. Returns its output."""
    try:
        done = subprocess.run(
            ["virsh", "--quiet", f"--connect={uri}", *map(str, words)],
            capture_output=True, text=True, timeout=VIRSH_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        raise JobError(
            f"no virsh on {os.uname().nodename}: libvirt starts guests "
            "(Debian: libvirt-clients, libvirt-daemon-system, qemu-system-x86)"
        ) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise JobError(f"virsh {words[0]} on {os.uname().nodename} ({uri}): {said}")
    return done.stdout


def domains(uri: str, names: Iterable[str]) -> list[str]:
    """Return those of these guests that exist, sorted."""
    return sorted(set(virsh(uri, "list", "--all", "--name").split()).intersection(names))


def destroy(uri: str, names: Iterable[str]) -> None:
    """End those of these guests that run."""
    for name in domains(uri, names):
        with contextlib.suppress(JobError):  # it has ended by itself
            virsh(uri, "destroy", name)


class Host:
    """This host's part of a cluster; the cluster's folder describes it."""

    def __init__(self, folder: Path, number: int) -> None:
        told = json.loads((folder / CLUSTER).read_text())
        self.options = Options(**told["options"])
        self.limit_s: float = told["limit_s"]
        self._uri: str = told["connect"]
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
                destroy(self._uri, [guest.name for guest in self.guests])
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
        if there := domains(self._uri, [guest.name for guest in guests]):
            raise JobError(
                f"{', '.join(there)} already running: stop with `alchemist "
                "virtual-cluster down`, or choose another --name"
            )
        for guest in guests:
            config = settings(options, guest, self._token)
            write_private(self._own / f"{guest.name}.conf", config.encode())
            make_volume(options, guest)
            definition = self._own / f"{guest.name}.xml"
            definition.write_text(domain(options, guest, self._own))
            self.guests.append(guest)
            virsh(self._uri, "create", definition, "--validate")  # without a permanent definition

    def _wait_ready(self) -> None:
        """Wait until all guests report on their consoles that Ray is up."""
        end = time.monotonic() + self.limit_s
        waiting = {guest.name for guest in self.guests}
        while waiting and not self._ends():
            for name in sorted(waiting):
                said = _text(self._own / f"{name}.log")
                if GUEST_FAILED in said:
                    raise JobError(f"guest {name}: {said[-TAIL_CHARACTERS:]}")
                if GUEST_READY in said:
                    waiting.remove(name)
            if time.monotonic() > end:
                name = min(waiting)
                raise JobError(
                    f"{', '.join(sorted(waiting))} not ready in {self.limit_s:.0f} s (increase "
                    f"--limit, or --emulate them); the console of {name} ends with:\n"
                    f"{_text(self._own / f'{name}.log')[-TAIL_CHARACTERS:]}"
                )
            time.sleep(POLL_INTERVAL_S)


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
    held = Host(Path(folder), int(os.environ.get("SLURM_NODEID", "0")))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, held.stop)
    held.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
