"""The process of a rank: it prepares its limits and MPI, runs the loop, and ends.

The loop waits for commands on a socket, and enters MPI only to compute: a rank that waits inside
MPI uses a whole core. The proxy sends every command to all ranks of the node. A routine's failure
on this rank is reported in the reply, and the loop continues.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from mpi_workers.data.loans import RankMemory
from mpi_workers.failures import Failure, Interrupted, text_of
from mpi_workers.matrix import device, memory
from mpi_workers.matrix.available_memory import (
    RANK_OOM_SCORE,
    NodeAllocations,
    set_oom_score,
)
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
from mpi_workers.node.cleanup import segments_of
from mpi_workers.node.processes import (
    allow_open_files,
    let_trace,
    take_short_turns,
    wake_on_time,
)
from mpi_workers.node.specs import RankConfig
from mpi_workers.node.stacks import crash_file
from mpi_workers.protocol.commands import COMMANDS, command_name
from mpi_workers.rank import history
from mpi_workers.rank.commands import INTERRUPTIBLE, Loader, RankCommands, Runner
from mpi_workers.rank.crashes import FINALIZED, report_exits, write_frames_to
from mpi_workers.rank.fabric import limit_endpoints
from mpi_workers.rank.foreign_code import (
    ProcessSettings,
    flush_python,
    traceback_of,
)
from mpi_workers.rank.gang_view import GangView
from mpi_workers.rank.imports import SlowImports
from mpi_workers.rank.output import buffer_lines, flush, use_rank_pipes
from mpi_workers.sigterm import outlive_sigterm
from mpi_workers.waits import interruption, mpi_layer
from mpi_workers.waits.interruption import InterruptWord, end_on_signal, place
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, Kind
from mpi_workers.wire.pmi import NO_SPAWN
from mpi_workers.wire.sockets import peer

ORPHANED = 98  # exit code of a rank whose proxy has ended
SEGMENTS_BITS = 32  # of a segment's number; the bits above count the processes of its rank
TRACEBACK_LIMIT = 16 << 10  # 16 KiB of a traceback are sent


class RankLoop:
    """The loop of one rank."""

    def __init__(self, config: RankConfig, loader: Loader, runner: Runner) -> None:
        world = MPI.Intracomm(MPI.COMM_WORLD.Dup())
        folder = Path(config.directory)
        allocations = NodeAllocations(folder, world.rank, world.size)
        pool = Pool(config.keep_bytes, shared=True, shortages=allocations.shortages)
        storage = Storage(world.rank, pool, allocations)
        first = config.renewal << SEGMENTS_BITS
        memory.number_segments(first + 1)
        lent = RankMemory(storage, config.token, config.data, ranks=config.ranks, first=first)
        interruption.watch(
            InterruptWord(folder / "interrupt"),
            crowded=config.crowded,
            one_node=config.one_node,
            index=world.rank - config.first,
        )
        is_mpich = MPI._sizeof(world) == mpi_layer.HANDLE_NBYTES
        interruption.start_layer(world, wanted=is_mpich and config.options.mpi_waits != "plain")
        mpi_layer.state().disposable = True
        end_on_signal(interruption.interrupted, INTERRUPTIBLE)
        if world.rank == 0:
            sys.meta_path.insert(0, SlowImports())
        self._settings = ProcessSettings()
        gang = GangView(world, storage, self._report, folder)
        self._rank = gang.rank
        self._peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._commands = RankCommands(gang, storage, loader, runner, lent)
        self._control, _ = connect(
            config.control,
            config.token,
            {
                "role": "rank",
                "rank": world.rank,
                "size": world.size,
                "pid": os.getpid(),
                "hostname": os.uname().nodename,
                "mpi": MPI.Get_library_version().split("\n")[0].strip("\0 "),
                "segments": sorted(segments_of()),
                "gpus": gpus_of(config, world.rank),
            },
            take_fds=False,
        )
        os.register_at_fork(after_in_child=self._control.close)
        let_trace(peer(self._control.sock)[0])
        threading.Thread(target=_end_with_proxy, args=(self._control,), daemon=True).start()

    def run(self) -> None:
        """Execute commands until told to exit."""
        while True:
            frame = self._control.recv()
            if frame.kind != Kind.COMMAND:
                continue
            body = frame.body
            if body["op"] == "exit":
                self._commands.close()
                return
            self._answer(body)

    def _reply(self, body: Body, reply: Body) -> None:
        try:
            self._control.send(Kind.REPLY, reply)
        except (Failure, TypeError, ValueError, OverflowError) as error:  # it cannot be encoded
            failure = self._routine_failure(error, body)
            self._control.send(Kind.REPLY, {"seq": body["seq"], "errors": [failure.to_map()]})

    def _answer(self, body: Body) -> None:
        """Execute a command, reply, and note it in the history while the reply travels."""
        begun, counter, waited_s = time.time(), time.perf_counter(), interruption.waited_s()
        copied = device.copied_nbytes()
        reply = self._execute(body)
        seconds = time.perf_counter() - counter
        if MPI.Is_finalized():
            sys.stderr.write(FINALIZED + "\n")
            sys.stderr.flush()
            os._exit(1)
        self._reply(body, reply)
        self._restore_settings(body["op"])
        mpi_s = interruption.waited_s() - waited_s
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = peak_kib - self._peak_kib
        self._peak_kib = peak_kib
        history.add(
            body, begun, seconds, min(mpi_s, seconds), grown << 10, failed="errors" in reply,
            device_nbytes=device.copied_nbytes() - copied,
        )  # fmt: skip

    def _execute(self, body: Body) -> Body:
        reply: Body = {"seq": body["seq"]}
        try:
            reply.update(self._commands.execute(body))
        except Interrupted as interrupted:
            reply["places"] = {place(interrupted): [self._rank]}
        except BaseException as error:  # a routine may call sys.exit: the gang continues
            if fault := device.fault_of(error):
                sys.stderr.write(f"this rank has lost its GPU: {fault}\n")
                flush()
                os._exit(1)
            reply["errors"] = [self._failure(error, body).to_map()]
        if self._commands.may_have_sent:
            reply["settle"] = True
        if self._commands.sequence:
            reply["sequences"] = [self._commands.sequence]
        if why := interruption.unsafe():
            reply["renew"] = why  # the gang starts other processes in place of the ranks
        command = COMMANDS.get(body["op"])
        if command is not None and command.prints:
            flush()
        return reply

    def _restore_settings(self, op: str) -> None:
        """Undo what a call has changed in this process, while its reply travels."""
        if op in ("call", "run"):
            self._settings.restore()
        elif op == "load":  # filters of warnings and the like are part of a library
            self._settings.restore_process()
            self._settings.keep()

    def _failure(self, error: BaseException, body: Body) -> Failure:
        if isinstance(error, Failure):
            error.facts.setdefault("rank", self._rank)
            return error
        if isinstance(error, MemoryError):
            words = f"rank {self._rank} ran out of memory: {text_of(error)}"
            return Failure("ResourceError", words, rank=self._rank)
        return self._routine_failure(error, body)

    def _routine_failure(self, error: BaseException, body: Body) -> Failure:
        kind, text = type(error).__name__, text_of(error)
        return Failure(
            "RoutineError",
            f"{command_name(body)} failed on rank {self._rank}: {kind}: {text}",
            rank=self._rank,
            traceback=traceback_of(error)[-TRACEBACK_LIMIT:],
        )

    def _report(self, fraction: float, text: str) -> None:
        self._control.send(
            Kind.EVENT, {"seq": self._commands.number, "fraction": float(fraction), "text": text}
        )


def _end_with_proxy(control: Connection) -> None:
    """End this rank when its proxy has ended, even while it computes."""
    poller = select.poll()
    poller.register(control.sock.fileno(), 0)  # only hang-up and error are reported
    while True:
        poller.poll()
        os._exit(ORPHANED)


def gpus_of(config: RankConfig, rank: int) -> str:
    """The GPUs that a rank sees, as its accelerator's runtime names them: ``"0,1"``."""
    return next(iter(config.devices[rank - config.first].values()), "") if config.devices else ""


INIT_SLACK_S = 10  # after the start's own time limit, whose error has more details
UNFIT_S = 2.0  # a process outside the gang's MPI world waits this long to be killed


def main(config: RankConfig, loader: Loader, runner: Runner) -> None:
    """Run a rank until it is told to exit. Does not return."""
    status = 1
    try:
        set_oom_score(RANK_OOM_SCORE)
        faulthandler.enable()
        outlive_sigterm()
        buffer_lines()
        take_short_turns()
        if not config.crowded:
            wake_on_time()
        allow_open_files()  # a launcher may have started this process
        set_variables(config)
        if not MPI.Is_initialized():
            limit_endpoints(config.host, one_node=config.one_node)
            # MPI_Init holds the GIL: only an alarm ends a rank that hangs in it without a proxy.
            signal.alarm(math.ceil(config.options.start_timeout_s) + INIT_SLACK_S)
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
            signal.alarm(0)
        leave_mpi_to_children()
        if MPI.COMM_WORLD.size != config.size:
            _report_wrong_world(config)
        use_rank_pipes(config.directory, MPI.COMM_WORLD.rank)
        write_frames_to(crash_file(config.directory, MPI.COMM_WORLD.rank))
        report_exits()
        rank = MPI.COMM_WORLD.rank - config.first
        if config.devices and (devices := config.devices[rank]):  # before anything here opens a GPU
            os.environ.update(devices)
            device.use(device.Device(products=config.options.gpu != "off"))
        RankLoop(config, loader, runner).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not MPI_Finalize: it is collective, and would wait for ranks that have ended.
        flush_python()
        os._exit(status)


def set_variables(config: RankConfig) -> None:
    """Set the variables of this rank, also for the BLAS that is loaded already."""
    # OpenBLAS and MKL, too, read OMP_NUM_THREADS where their own variable is not set.
    threads = config.options.env.get("OMP_NUM_THREADS", str(config.options.threads))
    os.environ.update({f"{name}_NUM_THREADS": threads for name in ("OMP", "OPENBLAS", "MKL")})
    os.environ.update(config.options.env)
    blas = os.environ["OPENBLAS_NUM_THREADS"]  # that of NumPy's wheels
    threadpool_limits({"openmp": int(threads), "blas": int(blas)})


# Variables that connect a process to the server of its launcher's PMI.
PMI_SERVER = ("PMI_FD", "PMI_PORT", "PMIX_")


def leave_mpi_to_children(env: MutableMapping[str, str] = os.environ) -> None:
    """Let programs that this rank starts call MPI_Init: they are no ranks, and have no PMI."""
    for name in [name for name in env if name.startswith(PMI_SERVER)]:
        del env[name]


def refuse_spawned_pools() -> None:
    """Have MPIPoolExecutor raise where it would spawn: it waits for ever when that fails."""
    from mpi4py.futures import MPIPoolExecutor  # noqa: PLC0415 - slow, and for the fork server only

    def refused(_executor: MPIPoolExecutor) -> NoReturn:
        raise RuntimeError(NO_SPAWN)

    # Not used by MPICommExecutor, which sets its own.
    MPIPoolExecutor._make_pool = staticmethod(refused)  # type: ignore[attr-defined]


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
