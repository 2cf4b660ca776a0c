"""The rank's loop: it waits for commands on a socket, and enters MPI only to compute.

A rank that waits inside MPI uses a whole core, so between commands it blocks in a socket read.
The proxy sends every command to all ranks of the node. A routine's failure on this rank is
reported in the reply, and the loop continues.
"""

from __future__ import annotations

import os
import resource
import select
import sys
import threading
import time
import traceback
from pathlib import Path

from mpi4py import MPI

from mpi_workers.data.rank_memory import RankMemory
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.matrix.available_memory import NodeAllocations
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
from mpi_workers.node.cleanup import segments_of
from mpi_workers.node.processes import let_trace
from mpi_workers.node.specs import RankConfig
from mpi_workers.rank import history, interruption, output
from mpi_workers.rank.commands import INTERRUPTIBLE, RankCommands, Runner
from mpi_workers.rank.gang import Gang
from mpi_workers.rank.interruption import InterruptWord, end_on_signal, place
from mpi_workers.rank.libraries import Loader
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.commands import COMMANDS
from mpi_workers.wire.frames import Body, Kind
from mpi_workers.wire.sockets import peer

ORPHANED = 98  # exit code of a rank whose proxy has ended
TRACEBACK_LIMIT = 16 << 10  # 16 KiB of a traceback are sent
FINALIZED = (
    "a library has called MPI_Finalize, which ends MPI for all ranks of the gang: remove that call "
    "from its routines"
)
# Frames of these modules, above the user's own code, are left out of tracebacks.
HIDDEN_MODULES = (
    "mpi_workers.rank.loop",
    "mpi_workers.rank.commands",
    "mpi_workers.rank.libraries",
    "ali.interface",
    "ali.run",
)


class RankLoop:
    """The loop of one rank."""

    def __init__(self, config: RankConfig, loader: Loader, runner: Runner) -> None:
        world = MPI.COMM_WORLD
        folder = Path(config.directory)
        allocations = NodeAllocations(folder, world.rank, world.size)
        pool = Pool(config.keep_bytes, shared=True, shortages=allocations.shortages)
        storage = Storage(world.rank, pool, allocations)
        self._memory = RankMemory(storage, config.token, config.data)
        interruption.watch(InterruptWord(folder / "interrupt"), crowded=config.crowded)
        end_on_signal(interruption.interrupted, INTERRUPTIBLE)
        gang = Gang(world, storage, self._report, folder)
        self._rank = gang.rank
        self._peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._commands = RankCommands(gang, storage, loader, runner)
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
            },
            take_fds=False,
        )
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
        reply = self._execute(body)
        seconds = time.perf_counter() - counter
        if MPI.Is_finalized():
            sys.stderr.write(FINALIZED + "\n")
            sys.stderr.flush()
            os._exit(1)
        self._reply(body, reply)
        mpi_s = interruption.waited_s() - waited_s
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown, self._peak_kib = peak_kib - self._peak_kib, peak_kib
        history.add(
            body, begun, seconds, min(mpi_s, seconds), grown << 10, failed="errors" in reply
        )

    def _execute(self, body: Body) -> Body:
        reply: Body = {"seq": body["seq"]}
        try:
            reply.update(self._commands.execute(body))
        except Interrupted as interrupted:
            reply["places"] = {place(interrupted): [self._rank]}
        except BaseException as error:  # a routine may call sys.exit: the gang continues
            reply["errors"] = [self._failure(error, body).to_map()]
        command = COMMANDS.get(body["op"])
        if command is not None and command.prints:
            output.flush()
        return reply

    def _failure(self, error: BaseException, body: Body) -> Failure:
        if isinstance(error, Failure):
            error.facts.setdefault("rank", self._rank)
            return error
        if isinstance(error, MemoryError):
            words = f"rank {self._rank} ran out of memory: {error}"
            return Failure("ResourceError", words, rank=self._rank)
        return self._routine_failure(error, body)

    def _routine_failure(self, error: BaseException, body: Body) -> Failure:
        routine = body.get("routine") or body.get("name") or body["op"]
        what = f"{body.get('library', '')}.{routine}".lstrip(".")
        where = error.__traceback__
        while (
            where and where.tb_next and where.tb_frame.f_globals.get("__name__") in HIDDEN_MODULES
        ):
            where = where.tb_next
        shown = traceback.format_exception(type(error), error, where)
        return Failure(
            "RoutineError",
            f"{what} failed on rank {self._rank}: {type(error).__name__}: {error}",
            rank=self._rank,
            traceback="".join(shown)[-TRACEBACK_LIMIT:],
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
