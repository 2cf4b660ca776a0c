"""Checks of one node: shared memory, limits, cores, memory, disks."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from alchemist_ray.observe.doctor import leftovers
from alchemist_ray.observe.doctor.finding import BAD, INFO, OK, WARN, Expected, Finding
from alchemist_ray.plural import counted
from mpi_workers.matrix.available_memory import available_bytes
from mpi_workers.matrix.sizes import readable
from mpi_workers.node.processes import OomWatch

SHM = Path("/dev/shm")
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
    check = "/dev/shm"
    if not SHM.is_dir():
        yield Finding(
            check, BAD, "it does not exist",
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
        yield Finding(check, BAD, message, f"remove files from it, or {larger}")
    elif free < SHM_SHARE * min(available_bytes(), memory_total()):
        yield Finding(
            check, WARN,
            f"{message}: small compared with {readable(available_bytes())} of free memory",
            f"{larger}; or give Ray a small object store (object_store_memory): otherwise Ray uses "
            "files, which is slow",
        )  # fmt: skip
    else:
        yield Finding(check, OK, message)


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
    yield Finding("memory", status, message, "" if status == OK else advice)


def files_limit(expected: Expected) -> Iterator[Finding]:
    """Check the limit of open files: each rank and each worker uses at least one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = f"{_limit(soft)} (up to {_limit(hard)})"
    advice = (
        "run `ulimit -n 65536` before Ray starts there, or set nofile in limits.conf, LimitNOFILE"
    )
    below = soft != resource.RLIM_INFINITY
    status = BAD if below and soft < FILES_LEAST else WARN if below and soft < FILES_GOOD else OK
    yield Finding("ulimit -n (files)", status, message, "" if status == OK else advice)


def processes_limit(expected: Expected) -> Iterator[Finding]:
    """Check how many more threads this user may start."""
    check = "ulimit -u (processes)"
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0:
        yield Finding(check, OK, "unlimited" if os.geteuid() else "root has no limit")
        return
    left = limit - _threads_of(os.geteuid())
    wanted = TASKS_LEAST + TASKS_PER_CORE * (os.cpu_count() or 1)
    message = f"{limit}, {left} left; Ray and ranks on all cores use about {wanted} (threads count)"
    advice = (
        "run `ulimit -u 65536` before Ray starts there, or set nproc in limits.conf; end old jobs"
    )
    status = BAD if left < TASKS_LEAST else WARN if left < wanted else OK
    yield Finding(check, status, message, "" if status == OK else advice)


def _threads_of(uid: int) -> int:
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if folder.stat().st_uid == uid:
                    count += len(list((folder / "task").iterdir()))
            except OSError:  # it has ended meanwhile
                continue
    return count


def locked_limit(expected: Expected) -> Iterator[Finding]:
    """Check the limit of locked memory, which RDMA needs for its buffers."""
    check = "ulimit -l (locked memory)"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = rdma_devices()
    message = f"{_limit(soft, size=True)}; RDMA devices: {', '.join(devices) or 'none'}"
    if devices and soft != resource.RLIM_INFINITY:
        yield Finding(
            check, WARN, message,
            "run `ulimit -l unlimited` (memlock in limits.conf, "
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf): otherwise MPI uses TCP, or "
            "fails when it registers memory",
        )  # fmt: skip
    else:
        yield Finding(check, OK, message)


def rdma_devices() -> list[str]:
    """Return the names of the node's RDMA devices."""
    return sorted(path.name for path in RDMA.iterdir()) if RDMA.is_dir() else []


def stack_limit(expected: Expected) -> Iterator[Finding]:
    """Check the stack size for native codes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    message = _limit(soft, size=True)
    if soft != resource.RLIM_INFINITY and soft < STACK_GOOD:
        yield Finding(
            "ulimit -s (stack)", WARN, message,
            f"run `ulimit -s {STACK_GOOD >> 10}` or more: Fortran codes with arrays on the stack "
            "end with SIGSEGV",
        )  # fmt: skip
    else:
        yield Finding("ulimit -s (stack)", OK, message)


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
            "cores", WARN,
            f"Ray counts {counted(ray_cpus, 'CPU')}; cores: {message}; ranks will share cores",
            f"start Ray there with --num-cpus={int(usable) or 1}: MPI waits by polling, "
            "and two ranks on a core alternate in milliseconds",
        )  # fmt: skip
    else:
        yield Finding("cores", OK, message + (f", Ray counts {ray_cpus:g}" if ray_cpus else ""))
    load, all_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * all_cores:
        yield Finding(
            "load", WARN, f"{load:.1f} processes compete for {counted(all_cores, 'core')}",
            "other programs compute there (`top`): runs will be slow and uneven; request whole "
            "nodes",
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
            "threads", WARN, f"{message}, but there are {counted(usable, 'core')}",
            f"set {many[0]} to cores / ranks of a node: threads_per_worker sets it for ranks "
            "only, not for your programs",
        )  # fmt: skip
    else:
        yield Finding("threads", INFO, f"{message}; ranks get threads_per_worker each")


def disk(expected: Expected) -> Iterator[Finding]:
    """Check the disk space for Ray's logs and sockets and the gangs' folders."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    status = BAD if free < DISK_LEAST else WARN if free < DISK_GOOD else OK
    advice = f"clean up {folder} (old ray/session_* folders), or set TMPDIR and Ray's --temp-dir"
    yield Finding(
        "temporary folder", status, f"{folder}: {readable(free)} free",
        "" if status == OK else advice,
    )  # fmt: skip


CHECKS = {
    "/dev/shm": shared_memory,
    "leftovers in /dev/shm": leftovers.stale,
    "memory": memory,
    "temporary folder": disk,
    "ulimit -n (files)": files_limit,
    "ulimit -u (processes)": processes_limit,
    "ulimit -l (locked memory)": locked_limit,
    "ulimit -s (stack)": stack_limit,
}
