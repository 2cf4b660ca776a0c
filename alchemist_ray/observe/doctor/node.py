"""The checks of one node, and their table, `checks`.

A check is a function from the site, whose settings are expected, to findings.
"""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from alchemist_ray.cluster.batch_job import job_id
from alchemist_ray.deploy.slurm.allocation import other_users
from alchemist_ray.deploy.slurm.sites import Site
from alchemist_ray.errors import JobError
from alchemist_ray.network import address_of, address_towards
from alchemist_ray.observe.doctor.finding import (
    BAD,
    INFO,
    OK,
    WARN,
    Check,
    Finding,
    graded,
    warn_if,
)
from alchemist_ray.plural import counted, listed
from alchemist_ray.version import __version__
from mpi_workers import build_native
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.available_memory import available_bytes
from mpi_workers.matrix.sizes import readable
from mpi_workers.node.cleanup import SHM, unused
from mpi_workers.node.processes import OomWatch
from mpi_workers.wire.interfaces import interface_of, interfaces

TOOL_TIMEOUT_S = 8.0  # less than a check's
SHOWN = 12


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Raises `subprocess.TimeoutExpired`."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip


def own_processes(*facts: str) -> Iterator[psutil.Process]:
    """Yield this user's processes, with these facts in `info`."""
    for process in psutil.process_iter(["uids", *facts]):
        if process.info["uids"].effective == os.geteuid():
            yield process


# --- memory, limits, cores, disks -------------------------------------------------------

RDMA = Path("/sys/class/infiniband")
DEVICES, VISIBLE = Path("/dev"), "CUDA_VISIBLE_DEVICES"
SHM_LEAST = 128 << 20  # 128 MiB: MPICH's segments of a few ranks, and Ray's minimal store
SHM_SHARE = 0.2  # of the free memory; Ray's object store wants 0.3 of all
FILES_LEAST, FILES_GOOD = 1024, 4096
# Ray starts a process for each CPU, of some 30 threads, and the kernel counts threads.
TASKS_PER_CORE, TASKS_LEAST = 50, 300
STACK_GOOD = 8 << 20  # 8 MiB, Linux's own; Fortran codes put arrays there
MEMORY_LEAST, MEMORY_GOOD = 512 << 20, 2 << 30
DISK_LEAST, DISK_GOOD = 256 << 20, 2 << 30
BUSY = 1.5  # load for each core


def shared_memory(site: Site) -> Iterator[Finding]:
    """Check that /dev/shm exists and has room for ranks and Ray's object store."""
    if not SHM.is_dir():
        yield Finding(
            BAD, "it does not exist",
            "mount a tmpfs there: MPI and Ray use it for memory shared between processes",
        )  # fmt: skip
        return
    space, memory = shutil.disk_usage(SHM), available_bytes()
    yield graded(
        space.free, SHM_LEAST, max(SHM_LEAST, SHM_SHARE * memory),
        f"{readable(space.total)}, {readable(space.free)} free, for {readable(memory)} of free "
        "memory",
        "remove files from it, or enlarge it: `docker run --shm-size=8g`, in Kubernetes an "
        "emptyDir with medium: Memory, elsewhere `mount -o remount,size=50% /dev/shm`; or give "
        "Ray a small object store (object_store_memory): otherwise Ray uses files, which is slow",
    )  # fmt: skip


def memory(site: Site) -> Iterator[Finding]:
    """Check the free memory within the limit of the pod, container or job."""
    limit, free = OomWatch().limit(), available_bytes()
    yield graded(
        free, MEMORY_LEAST, MEMORY_GOOD,
        f"{readable(free)} free" + (f", limit {readable(limit)} (cgroup)" if limit else ""),
        "raise the limit of the pod, container or job (resources.limits.memory, --memory, --mem), "
        "or run fewer processes: the kernel kills ranks that exceed it",
    )  # fmt: skip


def limits(site: Site) -> Iterator[Finding]:
    """Check the limits of open files, threads, locked memory and the stack."""
    # Each rank and each worker has at least one open file.
    soft, hard = map(finite, resource.getrlimit(resource.RLIMIT_NOFILE))
    yield graded(
        soft, FILES_LEAST, FILES_GOOD, f"{shown(soft)} (up to {shown(hard)})",
        "run `ulimit -n 65536` before Ray starts there, or set nofile in limits.conf, LimitNOFILE",
        "ulimit -n (files)",
    )  # fmt: skip

    most = finite(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if os.geteuid() == 0:  # root has no limit
        most = sys.maxsize
    left = most - sum(process.info["num_threads"] or 0 for process in own_processes("num_threads"))
    wanted = TASKS_LEAST + TASKS_PER_CORE * (os.cpu_count() or 1)
    needs = f", {left} left; Ray and ranks on all cores use about {wanted} (threads count)"
    yield graded(
        left, TASKS_LEAST, wanted, shown(most) + (needs if most < sys.maxsize else ""),
        "run `ulimit -u 65536` before Ray starts there, or set nproc in limits.conf; end old jobs",
        "ulimit -u (processes)",
    )  # fmt: skip

    # RDMA locks its buffers.
    most = finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    devices = sorted(path.name for path in RDMA.iterdir()) if RDMA.is_dir() else []
    yield Finding(
        WARN if devices and most != sys.maxsize else OK,
        f"{shown(most, size=True)}; RDMA devices: {', '.join(devices) or 'none'}",
        "run `ulimit -l unlimited` (memlock in limits.conf, PropagateResourceLimitsExcept=MEMLOCK "
        "in slurm.conf): otherwise MPI uses TCP, or fails when it registers memory",
        "ulimit -l (locked memory)",
    )  # fmt: skip

    most = finite(resource.getrlimit(resource.RLIMIT_STACK)[0])
    yield graded(
        most, 0, STACK_GOOD, shown(most, size=True),
        f"run `ulimit -s {STACK_GOOD >> 10}` or more: Fortran codes with arrays on the stack end "
        "with SIGSEGV",
        "ulimit -s (stack)",
    )  # fmt: skip


def finite(value: int) -> int:
    """Return a limit of `resource`, with `sys.maxsize` for an unlimited one."""
    return sys.maxsize if value == resource.RLIM_INFINITY else value


def shown(value: int, *, size: bool = False) -> str:
    """Format a limit."""
    if value == sys.maxsize:
        return "unlimited"
    return readable(value) if size else str(value)


def usable_cores(
    v2: Path = Path("/sys/fs/cgroup/cpu.max"),
    v1: Path = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
) -> float:
    """Return the cores that this process may use: its affinity and its container's CPU quota."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = v2.read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = v1.read_text(), v1.with_name("cpu.cfs_period_us").read_text()
        except OSError:
            return cores
    if quota.strip().isdigit():
        cores = min(cores, int(quota) / int(period))
    return cores


def cores(site: Site, ray_cpus: float) -> Iterator[Finding]:
    """Compare cores with Ray's CPUs, and with the load."""
    usable, every = usable_cores(), os.cpu_count() or 1
    message = f"{usable:g} of {every} usable"
    yield warn_if(
        ray_cpus > usable + 0.01,
        f"Ray counts {counted(ray_cpus, 'CPU')}; cores: {message}; ranks will share cores",
        f"start Ray there with --num-cpus={int(usable) or 1}: MPI waits by polling, "
        "and two ranks on a core alternate in milliseconds",
        message + (f", Ray counts {ray_cpus:g}" if ray_cpus else ""),
    )
    if (load := os.getloadavg()[0]) > BUSY * every:
        yield Finding(
            WARN, f"{load:.1f} processes compete for {counted(every, 'core')}",
            "other programs compute there (`top`): runs will be slow and uneven; request whole "
            "nodes", "load"
        )  # fmt: skip


def gpus(site: Site) -> Iterator[Finding]:
    """Check that ranks can use the GPUs of the node."""
    cards = [path.name for path in DEVICES.glob("nvidia[0-9]*")]
    found = f"{counted(len(cards), 'NVIDIA GPU')}; visible: {os.environ.get(VISIBLE, 'all')}"
    if not cards:
        yield Finding(INFO, "none")
    else:
        yield warn_if(
            find_spec("torch") is None,
            f"{found}; PyTorch is not installed",
            "pip install torch there: matrices on a GPU (A.on_device) and large products need it",
            found,
        )


def threads() -> Iterator[Finding]:
    """Check the number of threads of this program's BLAS. (Ray sets that of its actors.)"""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    told = {name: os.environ[name] for name in names if name in os.environ}
    message = ", ".join(f"{k}={v}" for k, v in told.items()) or "OMP_NUM_THREADS is not set"
    usable = usable_cores()
    many = [k for k, v in told.items() if v.isdigit() and int(v) > usable + 0.01]
    if many:
        yield Finding(
            WARN, f"{message}, but there are {counted(usable, 'core')}",
            f"set {many[0]} to cores / ranks of a node: threads_per_worker sets it for ranks "
            "only, not for your programs",
        )  # fmt: skip
    else:
        yield Finding(INFO, f"{message}; ranks get threads_per_worker each")


def disk(site: Site) -> Iterator[Finding]:
    """Check the disk space for Ray's logs and sockets and the gangs' folders."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    yield graded(
        free, DISK_LEAST, DISK_GOOD, f"{folder}: {readable(free)} free",
        f"clean up {folder} (old ray/session_* folders), or set TMPDIR and Ray's --temp-dir",
    )  # fmt: skip


# --- leftovers of killed jobs -------------------------------------------------------------

MPICH = "mpich_*"
# Segments of MPI libraries and Ray that remain when their processes are killed.
SEGMENTS = (
    MPICH, "cray-shared-mem*", "psm_*", "psm2_*", "psm3_*", "vader_segment*", "sm_segment*",
    "sem.*", "plasma*", "ucx_*",
)  # fmt: skip
STALE_S = 60.0
LEFTOVERS_SHOWN = 3
REMOVED = 50  # named in the advice


def leftovers(site: Site) -> Iterator[Finding]:
    """Check for segments of this user's ended jobs."""
    old = time.time() - STALE_S
    found = {p.name: s.st_blocks * 512 for p, s in unused(SEGMENTS) if s.st_mtime < old}
    # By name: segments of ranks that run have the same prefixes.
    files = " ".join(f"{SHM}/{name}" for name in sorted(found)[:REMOVED])
    again = "; then ask again for the others" if len(found) > REMOVED else ""
    yield warn_if(
        found,
        f"{counted(len(found), 'segment')} that no process has open, "
        f"{readable(sum(found.values()))}: {listed(sorted(found), LEFTOVERS_SHOWN)}",
        f"`rm {files}`, unless a job of yours runs there in a container{again}",
        "none of this user",
    )


def remove_mpich(age_s: float) -> list[str]:
    """Remove MPICH's segments up to this age, of ranks just killed. Returns their names."""
    young = time.time() - age_s
    removed = [path for path, about in unused([MPICH]) if about.st_mtime >= young]
    for path in removed:
        path.unlink(missing_ok=True)
    return [path.name for path in removed]


# --- software -------------------------------------------------------------------------------

SLOW_IMPORT = "rfc3987_syntax"  # it parses a grammar of 100 lines at its import
PACKAGES = ("ray", "numpy", "mpi4py", "mpich")
SCALAPACK = "SCALAPACK_LIB"
SCALAPACK_PLACES = ("usr/lib/*/libscalapack-mpich*.so*", "usr/lib*/libscalapack*.so*")
BLAS = re.compile(r"libblas\.so\S* => (\S+)")
FORCED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def openblas(site: Site) -> Iterator[Finding]:
    """Check for variables that force OpenBLAS to the kernels of another processor."""
    forced = [name for name in FORCED if name in os.environ]
    told = ", ".join(f"{name}={os.environ[name]}" for name in forced)
    yield warn_if(
        forced, f"{told} overrides the detection of the processor",
        f"unset {' and '.join(forced)} before Ray starts: the wrong kernels can halve the speed of "
        "NumPy and of the ranks",
        "detects the processor itself",
    )  # fmt: skip


def scalapack_blas(site: Site, root: Path = Path("/")) -> Iterator[Finding]:
    """Check that ScaLAPACK does not use the reference BLAS."""
    given = os.environ.get(SCALAPACK)
    found = [Path(given)] if given else [p for g in SCALAPACK_PLACES for p in sorted(root.glob(g))]
    if not found or shutil.which("ldd") is None:
        yield Finding(INFO, "no ScaLAPACK was found")
        return
    match = BLAS.search(run("ldd", str(found[0])).stdout)
    blas = os.path.realpath(match[1]) if match else ""
    yield warn_if(
        "/blas/" in blas, f"{found[0]} uses the reference BLAS, {blas}",
        "install an optimized BLAS (Debian: apt-get install libopenblas0-pthread): matmul of "
        "4000 x 4000 took 10 s instead of 0.7 s",
        f"{found[0]}: {blas or 'linked statically'}",
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    found = {"alchemist-on-ray": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def copies(site: Site) -> Iterator[Finding]:
    """Report the compiled parts: the kernel that copies between array orders, waits in MPI."""
    yield Finding(INFO, copy_kernels.description())
    lacking = build_native.missing()
    yield warn_if(lacking, lacking, build_native.ADVICE, "waits in MPI end with their call")


def imports(site: Site) -> Iterator[Finding]:
    """Look for a package that makes each start of a process of Ray slow."""
    yield warn_if(
        find_spec(SLOW_IMPORT),
        f"{SLOW_IMPORT}, which came with Jupyter's server, costs every process that imports Ray "
        "1.4 s of CPU: jsonschema imports it where it is there, and it builds a grammar",
        "`pip uninstall rfc3987-syntax`: no program needs it but for one format of JSON schemas",
        "no package is known to make them slow",
    )


def mpi_library(site: Site) -> Iterator[Finding]:
    """Check that mpi4py loads an MPI in a new process: the site's, if set."""
    done = run(sys.executable, "-m", "ali", "mpi")
    if code := done.returncode:
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        words = done.stderr.strip().splitlines() or ["it prints nothing"]
        yield Finding(
            BAD, f"mpi4py loads no MPI ({how}): {words[-1]}",
            "`python -m ali mpi` repeats it. Run `pip install mpich mpi4py` there; or set "
            "MPI4PY_LIBMPI (mpi.library of the site file) to an MPI with MPICH's ABI on this node, "
            "and load its modules. If a signal ended it, see /dev/shm, memory and limits above",
        )  # fmt: skip
        return
    told = json.loads(done.stdout)
    message = f"{told['version']}, {told['family']}, {told['library']}"
    level = OK
    if told["family"] == "Open MPI" and not site.mpi.library:
        level = WARN if shutil.which("srun") else BAD
    yield unfit(message, told["library"], site) or Finding(
        level, message,
        "gangs use MPICH or an MPI with its ABI, and start ranks of Open MPI only by `srun "
        "--mpi=pmix`: unset MPI4PY_LIBMPI there, or load the modules of such an MPI",
    )  # fmt: skip


def unfit(message: str, library: str, site: Site) -> Finding | None:
    """Return a finding if the loaded library is not the site's, else None."""
    wanted = os.path.expandvars(site.mpi.library)
    if not wanted or os.path.realpath(wanted) == os.path.realpath(library):
        return None
    advice = (
        f"set MPI4PY_LIBMPI={wanted} before Ray starts (`alchemist slurm run --site "
        f"{site.name}` does), or correct mpi.library"
    )
    if "$" in wanted:
        name = wanted.partition("$")[2].partition("/")[0].strip("{}")
        advice = f"{name} is not set there: load the site's modules before Ray starts"
    return Finding(BAD, f"{message}; the site {site.name} requires {wanted}", advice)


# --- network ----------------------------------------------------------------------------------

SLOW_NAME_S = 2.0
FASTER = 2  # times: an unused network that is this much faster is reported


def own_address(site: Site, ray_address: str, towards: str) -> str:
    """Return this node's address: of the site's interface, Ray's, or on the route to a peer."""
    with contextlib.suppress(JobError):
        if site.nodes.interface:
            return address_of(site.nodes.interface, interfaces())
    with contextlib.suppress(JobError):
        return ray_address or address_towards(towards)
    return "127.0.0.1"


def used_interface(site: Site, ray_address: str, peers: int) -> Iterator[Finding]:
    """Check the interfaces, and the one that Ray uses."""
    here, states = interfaces(), psutil.net_if_stats()

    def speed(name: str) -> int:
        """The Mbit/s of an interface, 0 if unknown."""
        return states[name].speed if name in states else 0

    def described(name: str, address: str) -> str:
        """Format ``eth0 10.0.0.1, MTU 1500, 10000 Mbit/s``."""
        mtu = f", MTU {states[name].mtu}" if name in states else ""
        return f"{name} {address}{mtu}" + (f", {speed(name)} Mbit/s" if speed(name) else "")

    every = "; ".join(described(n, a) for n, a in here.items()) or "none with an address"
    fix = "start Ray there with --node-ip-address (alchemist slurm does, by the site file)"
    wanted = ""
    if site.nodes.interface:
        try:
            address = address_of(site.nodes.interface, here)
        except JobError as error:
            correct = f"set nodes.interface in the site file {site.name} to one of them"
            yield Finding(BAD, str(error), correct)
            return
        wanted = interface_of(address) or address
    if not ray_address:
        yield Finding(OK if wanted else INFO, f"{wanted + ' of ' if wanted else ''}{every}")
        return
    used = interface_of(ray_address)
    if used is None:
        yield Finding(BAD, f"Ray's address {ray_address} is on no interface: {every}", fix)
        return
    quicker = [
        n for n, a in here.items() if not is_local(a) and speed(n) > FASTER * speed(used) > 0
    ]
    status, problem = OK, ""
    if ray_address.startswith("127.") and peers > 1:
        status, problem = BAD, ": no other node can reach it there"
    elif wanted and not any(fnmatch.fnmatchcase(used, p) for p in site.nodes.interface):
        status, problem = BAD, f"; the site {site.name} requires {wanted}"
    elif quicker:
        status, problem = WARN, f"; {', '.join(quicker)} is faster"
    yield Finding(status, f"Ray uses {used} of {every}{problem}", fix)


def own_name(site: Site) -> Iterator[Finding]:
    """Check that the node resolves its own name quickly: launchers use names."""
    name = socket.gethostname()
    start = time.monotonic()
    advice = f"add {name} to /etc/hosts or to the name server: the launchers srun and hydra use it"
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Finding(WARN, f"{name} cannot be resolved", advice)
        return
    took = time.monotonic() - start
    yield warn_if(
        took > SLOW_NAME_S,
        f"{name} is {address}, after {took:.1f} s",
        advice,
        f"{name} is {address}",
    )


# --- security ----------------------------------------------------------------------------------

TOKEN = Path("~/.ray/auth_token")
OURS = re.compile(r"\bray\b|\bray::|raylet|gcs_server|mpi_workers|alchemist")
DAEMONS = ("raylet", "gcs_server")
SESSION = re.compile(r"(/[^\s=]*/session_[^/\s]+)")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def token_path() -> Path:
    """Return the file with Ray's token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN).expanduser()


def auth_mode(env: Mapping[str, str] = os.environ) -> str:
    """Return the mode, ``token`` or ``disabled``, of a Ray process with this environment."""
    path = Path(env.get("RAY_AUTH_TOKEN_PATH") or TOKEN).expanduser()
    return env.get("RAY_AUTH_MODE") or ("token" if path.is_file() else "disabled")


def running_modes() -> set[str]:
    """Return the modes of this user's Ray daemons on this machine."""
    pids = [pid for pid, (name, _) in own_commands().items() if name in DAEMONS]
    return {mode for pid in pids if (mode := _mode_of(pid))}


def _mode_of(pid: int) -> str:
    """Return the mode of a running Ray process; empty if it has ended.

    Workers and agents overwrite their environment with a title: their raylet's counts.
    """
    try:
        process = psutil.Process(pid)
        above = (each for each in (process, *process.parents()) if each.name() in DAEMONS)
        return auth_mode(next(above, process).environ())
    except (psutil.Error, OSError):
        return ""


def own_commands() -> dict[int, tuple[str, str]]:
    """Return name and command line of this user's processes, by number."""
    return {
        process.pid: (process.info["name"], " ".join(process.info["cmdline"] or ()))
        for process in own_processes("name", "cmdline")
    }


def reachable_ports() -> list[tuple[str, int, int | None]]:
    """Return address, port and process of sockets that listen to other machines, too."""
    return [
        (found.laddr.ip, found.laddr.port, found.pid)
        for found in psutil.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN and not is_local(found.laddr.ip)
    ]


def is_local(address: str) -> bool:
    """Return whether only this machine reaches an address."""
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def open_ports(site: Site) -> Iterator[Finding]:
    """Check which ports of Ray and gangs can be reached from other machines."""
    commands = own_commands()
    guarded: dict[str, set[str]] = defaultdict(set)
    unguarded: dict[str, set[str]] = defaultdict(set)  # of a Ray without a token
    for address, port, pid in reachable_ports():
        name, command = commands.get(pid or 0, ("", ""))
        if OURS.search(command):
            of_gang = "mpi_workers" in command
            by_process = guarded if of_gang or _mode_of(pid or 0) == "token" else unguarded
            everywhere = address in ("0.0.0.0", "::")
            by_process[name].add(f"{'*' if everywhere else address}:{port}")
    if not guarded and not unguarded:
        yield Finding(OK, "Ray and gangs can be reached from this machine only")
    if guarded:
        yield Finding(
            INFO,
            f"reachable from other machines: {_told(guarded)}. Ray's ports require its token "
            "(metrics do not), gangs' ports the gang's token; MPI's own ports of gangs on several "
            "nodes require none",
        )
    if unguarded:
        yield Finding(
            WARN, f"reachable from other machines: {_told(unguarded)}. This Ray requires no token",
            "set RAY_AUTH_MODE=token before Ray starts, start Ray at 127.0.0.1 "
            "(--node-ip-address) on a single machine, or close the ports with a firewall",
        )  # fmt: skip


def _told(by_process: Mapping[str, set[str]]) -> str:
    told = [f"{name} {', '.join(sorted(ports))}" for name, ports in sorted(by_process.items())]
    return listed(told, SHOWN, "; ")


def is_private(path: Path) -> bool:
    """Return whether only this user (and root) can reach a path, or a folder on its way."""
    return any(
        about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077
        for about in (folder.stat() for folder in (path, *path.parents))
    )


def token_files(site: Site) -> Iterator[Finding]:
    """Check the mode of the file with Ray's token."""
    path = token_path()
    if not path.is_file():
        yield Finding(INFO, f"there is no file {path}")
    else:
        yield warn_if(
            not is_private(path), f"other users may read {path} "
            f"(mode {stat.S_IMODE(path.stat().st_mode):o})", f"chmod 600 {path}",
            f"{path} is readable by this user only",
        )  # fmt: skip


def session_folders(site: Site) -> Iterator[Finding]:
    """Check who may enter the folders of this user's Ray, which contain sockets and logs."""
    folders = {
        Path(match[1])
        for _, command in own_commands().values()
        if DAEMONS[0] in command and (match := SESSION.search(command))
    }
    for folder in sorted(folders):
        try:
            mode, private = stat.S_IMODE(folder.stat().st_mode), is_private(folder)
        except OSError:  # it has ended
            continue
        may = "write to" if mode & 0o022 else "read"
        yield warn_if(
            not private, f"other users may {may} {folder} (mode {mode:o})",
            "start Ray with --temp-dir in a folder of mode 700 with a short path (`alchemist "
            "slurm` and sessions that start Ray do), or make its parent private",
            f"{folder} is accessible to this user only",
        )  # fmt: skip
    if not folders:
        yield Finding(INFO, "this user runs no Ray here")


def other_users_ray(site: Site) -> Iterator[Finding]:
    """Report Ray clusters of other users on this machine."""
    running = psutil.process_iter(["name", "username"])
    users = {each.info["username"] for each in running if each.info["name"] in DAEMONS}
    others = users - {psutil.Process().username()}
    yield warn_if(
        others, f"also running here: Ray of {listed(sorted(others), SHOWN)}",
        "set RAY_ADDRESS so that programs join your own cluster, and RAY_TMPDIR so that the "
        "session folders differ",
        "none on this machine",
    )  # fmt: skip


def shared_node(site: Site) -> Iterator[Finding]:
    """Check whether other people run processes on a node of a batch job."""
    if job_id(os.environ) is None:
        return
    others = other_users()
    yield warn_if(
        others, f"other users run processes here: {listed(others, SHOWN)}",
        "request whole nodes (--exclusive): MPI's ports of gangs on several nodes require no token",
        "no other user runs a process here",
    )  # fmt: skip


def ptrace_scope(site: Site, path: Path = PTRACE_SCOPE) -> Iterator[Finding]:
    """Check whether ranks may read each other's memory, MPI's fastest way within a node."""
    text = path.read_text().strip() if path.is_file() else ""
    yield warn_if(
        text.isdigit() and int(text) >= 2, f"{text}: ranks cannot read each other's memory",
        "MPI copies large messages twice within a node; `sysctl kernel.yama.ptrace_scope=1`, or "
        "accept it",
        text or "unrestricted",
    )  # fmt: skip


def checks(ray_address: str, ray_cpus: float, peers: int) -> dict[str, Check]:
    """The table of the checks of one node, in the order of the report."""
    return {
        "/dev/shm": shared_memory,
        "leftovers in /dev/shm": leftovers,
        "memory": memory,
        "temporary folder": disk,
        "limits": limits,
        "cores": partial(cores, ray_cpus=ray_cpus),
        "GPUs": gpus,
        "network interface": partial(used_interface, ray_address=ray_address, peers=peers),
        "host name": own_name,
        "MPI library": mpi_library,
        "copies between array orders": copies,
        "imports of Ray": imports,
        "OpenBLAS": openblas,
        "BLAS of ScaLAPACK": scalapack_blas,
        "open ports": open_ports,
        "token file": token_files,
        "Ray session folder": session_folders,
        "other users' Ray": other_users_ray,
        "shared node": shared_node,
        "ptrace scope": ptrace_scope,
    }
