"""The process of a rank: it prepares its limits and MPI, runs the loop, and ends.

A gang on one node needs no network: its ranks exchange messages through shared memory. A gang on
several nodes listens only on the interface of its node's address, on the loopback interface, and on
InfiniBand devices. A site's own settings are kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from mpi_workers.node.specs import RankConfig
from mpi_workers.node.stacks import crash_file
from mpi_workers.rank.commands import Runner
from mpi_workers.rank.libraries import Loader
from mpi_workers.rank.loop import FINALIZED, RankLoop
from mpi_workers.rank.output import buffer_lines, use_rank_pipes
from mpi_workers.wire.blocking import connect
from mpi_workers.wire.interfaces import interfaces

IF_INET6 = Path("/proc/net/if_inet6")
INFINIBAND = Path("/sys/class/infiniband")
# UCX: loopback and shared memory (System V, POSIX, CMA). UCX removes the names of its segments as
# soon as they are mapped, so none remains after SIGKILL.
UCX_ONE_NODE = "self,sm"
OFI_ONE_NODE = "shm"
LOOPBACK = "lo"


def limit_endpoints(
    host: str | None, *, one_node: bool, env: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables of UCX and libfabric that limit MPI's endpoints. Call it before MPI_Init.

    Parameters
    ----------
    host : str or None
        This node's address.
    one_node : bool
        Whether all ranks of the gang are on this node.
    env : mapping
        Variables that are set already are kept.
    """
    if one_node:
        env.setdefault("UCX_TLS", UCX_ONE_NODE)
        if env.get("MPIR_CVAR_CH4_NETMOD") == "ofi":
            env.setdefault("FI_PROVIDER", OFI_ONE_NODE)
        return
    interface = interface_of(host) if host is not None else None
    if interface is None:
        if host is not None:
            sys.stderr.write(f"no interface has the address {host}: MPI listens on all of them\n")
        return
    # Without the loopback device, ranks of one node crash in UCX when they exchange messages.
    devices = dict.fromkeys([interface, LOOPBACK, *_infiniband_ports()])
    env.setdefault("UCX_NET_DEVICES", ",".join(devices))
    env.setdefault("FI_TCP_IFACE", interface)


def interface_of(host: str) -> str | None:
    """Name of this machine's interface with an address, or None."""
    if ":" in host:
        with contextlib.suppress(OSError):
            wanted = socket.inet_pton(socket.AF_INET6, host.partition("%")[0]).hex()
            for line in IF_INET6.read_text().splitlines():
                if line.startswith(wanted):
                    return line.split()[-1]
        return None
    return next((name for name, address in interfaces().items() if address == host), None)


def _infiniband_ports() -> list[str]:
    """Active InfiniBand and RoCE ports by UCX's names: ``mlx5_0:1``."""
    ports = []
    for path in sorted(INFINIBAND.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in (path / "state").read_text():
                ports.append(f"{path.parents[1].name}:{path.name}")
    return ports


LIBRARY = Path(__file__).with_name("crash_frames.so")  # `crash_frames.c`, where it was built


def write_frames_to(path: str) -> None:
    """Have a crash write the frames of its thread to a file: of C where we can, then of Python."""
    file = open(path, "wb", buffering=0)  # noqa: SIM115  # faulthandler keeps it
    faulthandler.enable(file, all_threads=False)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(LIBRARY)).alchemist_show_crashes(file.fileno())


_EXIT_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)
EXIT_FRAMES = 64
PEER_S = 0.2  # a rank that MPI ends because of another one leaves it this time to be noticed first


def report_exits() -> None:
    """Have this process print why it ends, if a library ends it, and end with a code other than 0.

    Ranks end themselves without the handlers of exit(3), so only exit(3) in a library or in MPI
    runs them.
    """
    on_exit = getattr(ctypes.CDLL(None), "on_exit", None)  # of glibc
    if on_exit is not None:
        on_exit(_report_exit, ctypes.c_void_p(os.getpid()))


@_EXIT_HANDLER  # type: ignore[untyped-decorator]  # keeps the function alive
def _report_exit(code: int, pid: int | None) -> None:
    if os.getpid() != pid:
        return  # a child that a library has forked
    callers = _calling_frames()
    delay_s = 0.0
    if MPI.Is_finalized():
        words = FINALIZED
    elif any("MPI_Abort" in frame for frame in callers):
        words = ""  # MPI has printed the call, from which the proxy knows it
    elif any("libmpi" in os.path.basename(frame.partition("(")[0]) for frame in callers):
        words = (
            f"MPI has ended this rank's process with code {code}: another rank has called "
            "MPI_Abort or has ended, or MPI cannot continue after an error"
        )
        delay_s = PEER_S
    else:
        words = (
            f"a library has ended this rank's process with code {code}: it called exit(), or STOP "
            "in Fortran. It must return an error instead (alchemist_fail, alchemist_failed)"
        )
    sys.stderr.write(words + "\n" * bool(words))
    sys.stderr.flush()
    time.sleep(delay_s)
    os._exit(code or 1)


def _calling_frames() -> list[str]:
    """The C frames of this thread: ``/lib/libmpi.so.12(MPI_Abort+0x1b) [0x7f...]``."""
    libc = ctypes.CDLL(None)
    libc.backtrace_symbols.restype = ctypes.POINTER(ctypes.c_char_p)
    addresses = (ctypes.c_void_p * EXIT_FRAMES)()
    count = libc.backtrace(addresses, EXIT_FRAMES)
    symbols = libc.backtrace_symbols(addresses, count)
    return [(symbols[i] or b"").decode(errors="replace") for i in range(count)] if symbols else []


INIT_SLACK_S = 10  # after the start's own time limit, whose error has more details
UNFIT_S = 2.0  # a process outside the gang's MPI world waits this long to be killed


def main(config: RankConfig, loader: Loader, runner: Runner) -> None:
    """Run a rank until it is told to exit. Does not return."""
    status = 1
    try:
        faulthandler.enable()
        buffer_lines()
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        threadpool_limits(config.threads)
        if not MPI.Is_initialized():
            limit_endpoints(config.host, one_node=config.one_node)
            # MPI_Init holds the GIL: only an alarm ends a rank that hangs in it without a proxy.
            signal.alarm(math.ceil(config.start_timeout_s) + INIT_SLACK_S)
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
            signal.alarm(0)
        if MPI.COMM_WORLD.size != config.size:
            _report_wrong_world(config)
        use_rank_pipes(config.directory, MPI.COMM_WORLD.rank)
        write_frames_to(crash_file(config.directory, MPI.COMM_WORLD.rank))
        report_exits()
        RankLoop(config, loader, runner).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not MPI_Finalize: it is collective, and would wait for ranks that have ended.
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)


def _report_wrong_world(config: RankConfig) -> NoReturn:
    """Report to the proxy that this process is not in the gang's MPI world, and end."""
    mpi = " ".join(MPI.Get_library_version().split("\n")[0].strip("\0 ").split())
    unfit = (
        f"is in an MPI world of {MPI.COMM_WORLD.size} instead of {config.size} ranks: the launcher "
        f"and the MPI library ({mpi}) do not speak the same PMI. {config.advice}".rstrip()
    )
    about = {"role": "rank", "rank": MPI.COMM_WORLD.rank, "pid": os.getpid(), "unfit": unfit}
    if MPI.COMM_WORLD.size == 1:
        MPI.Finalize()  # alone it does not wait, and removes its names from /dev/shm
    connect(config.control, config.token, about, take_fds=False)
    time.sleep(UNFIT_S)  # the proxies end them all; a launcher would at the first one's exit
    os._exit(1)


def print_world() -> None:
    """Print rank and size of the MPI world in which a launcher has started this process."""
    MPI.Init()
    sys.stdout.write(json.dumps({"rank": MPI.COMM_WORLD.rank, "size": MPI.COMM_WORLD.size}) + "\n")
    sys.stdout.flush()
    MPI.Finalize()
