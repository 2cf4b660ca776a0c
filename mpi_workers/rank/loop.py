"""The rank: waits for commands on a socket, enters MPI only to compute.

A rank that waits inside MPI burns a core, so between commands it blocks in a
socket read. Its proxy sends every command to all ranks of the node; a routine's
failure on this rank is a reply like any other, and the loop goes on.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from mpi_workers.data.server import DataServer
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.matrix.dist_matrix import DistMatrix, check_dtype
from mpi_workers.matrix.layout import Distribution, Grid, default_grid
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.redistribution import redistribute
from mpi_workers.matrix.storage import Storage
from mpi_workers.node import output
from mpi_workers.node.cleanup import segments_of
from mpi_workers.node.processes import own_pipe
from mpi_workers.node.specs import RankConfig
from mpi_workers.rank import communicator as gang_comm
from mpi_workers.rank.communicator import GangComm
from mpi_workers.rank.interruption import InterruptWord, end_on_signal
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, Kind

INIT_SLACK_S = 10  # after the start's own time limit, which has more to say
UNFIT_S = 2.0  # how long one that is no rank waits for its end
ORPHANED = 98  # exit code of a rank whose proxy is gone
TRACEBACK_LIMIT = 16 << 10  # 16 KiB of a traceback travel
NOT_SHOWN = ("mpi_workers.rank.loop", "ali.interface", "ali.run")  # the way to the user's own code
SPEAKING = ("call", "run", "load")  # commands that run code which may print


class Library(Protocol):
    """What the loop needs of a loaded library (`ali` provides it)."""

    def describe(self) -> Body:
        """Name, documentation and signatures, as a map."""

    def call(self, gang: Gang, routine: str, arguments: Mapping[str, Any]) -> Sequence[Any]:
        """Run a routine; one value per declared result."""

    def close(self) -> None:
        """Give up what the library holds."""


class Runner(Protocol):
    """Runs what a user has sent: a function, a script (`ali` provides it)."""

    def run(
        self, gang: Gang, task: Body, folder: Path, matrix: Callable[[Any], DistMatrix]
    ) -> tuple[Sequence[DistMatrix], Any]:
        """Run it on this rank: the matrices that it made, and the result as it travels.

        `folder` is where files for and from it lie, `matrix` finds matrices by id.
        """


Loader = Callable[[str, str | None], Library]


class Gang:
    """What a routine sees of its gang: communicator, memory, progress."""

    def __init__(
        self, world: MPI.Intracomm, storage: Storage, tell: Callable[[float, str], None]
    ) -> None:
        self._world = world
        self._storage = storage
        self._tell = tell
        self._told = 0.0
        self.rank: int = world.rank
        self.size: int = world.size
        self.grid: Grid = default_grid(world.size)
        self._comm = GangComm(world.Dup())
        self._used = False

    @property
    def comm(self) -> GangComm:
        """The communicator of the call that runs; after a call that failed it may be another."""
        self._used = True
        return self._comm

    def enter(self) -> None:
        """A call begins, and those before it have left nothing under way."""
        self._used = False

    def renew(self) -> None:
        """A fresh communicator if the call that failed has used the old one. Collective.

        On the old one messages may be under way for ever, so MPI never gets it back, and has
        2048 of them.

        Raises
        ------
        Failure
            ResourceError, if there is none left.
        """
        used = self._world.allreduce(self._used, MPI.LOR)
        if used:
            try:
                self._comm = GangComm(self._world.Dup())
            except MPI.Exception as error:
                raise Failure(
                    "ResourceError",
                    "MPI has no communicator left for this gang: every call that fails while its "
                    "ranks speak with each other uses one up, and there are about 2000. Fetch "
                    f"what you need, and open another session ({error})",
                ) from None
        gang_comm.forget()
        self._used = False

    def part(self, colour: int) -> Gang:
        """The ranks that give the same colour, as a gang of their own. Collective."""
        world = MPI.Intracomm(self._world.Split(colour, self.rank))
        return Gang(world, Storage(world.rank, self._storage.pool), self._tell)

    def new(
        self, shape: tuple[int, int], dtype: Any, layout: str, *, zero: bool = True
    ) -> DistMatrix:
        """Memory for a matrix spread over the gang (no communication)."""
        distribution = Distribution(layout, (int(shape[0]), int(shape[1])), self.grid)
        matrix = self._storage.new(distribution, check_dtype(dtype))
        if zero:
            matrix.local[...] = 0
        return matrix

    def to_layout(self, matrix: DistMatrix, layout: str) -> DistMatrix:
        """The matrix in another layout; itself if it has it. Collective."""
        if matrix.layout == layout:
            return matrix
        result = self.new(matrix.shape, matrix.dtype, layout, zero=False)
        redistribute(matrix, result, self.comm)
        return result

    def check(self) -> None:
        """Raise `Interrupted` if the call has failed on another rank or was cancelled."""
        if gang_comm.interrupted():
            raise Interrupted

    def progress(self, fraction: float, text: str) -> None:
        """Tell the user how far the routine is (rank 0, at most ten times a second)."""
        now = time.monotonic()
        if self.rank == 0 and now - self._told > 0.1:
            self._told = now
            self._tell(fraction, text)


class RankLoop:
    """The loop of one rank."""

    def __init__(self, config: RankConfig, loader: Loader, runner: Runner) -> None:
        self._loader = loader
        self._runner = runner
        self._libraries: dict[str, Library] = {}
        self._folder = Path(config.directory)
        self._call = 0
        self._made: list[int] = []  # matrices, by the last call
        world = MPI.COMM_WORLD
        self.storage = Storage(world.rank, Pool(config.keep_bytes, shared=True))
        path = f"{config.directory}/rank{world.rank}.sock"
        self._server = DataServer(self.storage, config.token, path, config.host)
        gang_comm.watch(InterruptWord(f"{config.directory}/interrupt"), crowded=config.crowded)
        end_on_signal(
            gang_comm.interrupted, {RankLoop._on_call.__code__, RankLoop._on_run.__code__}
        )
        self.gang = Gang(world, self.storage, self._tell)
        self._control, _ = connect(
            config.control,
            config.token,
            {
                "role": "rank",
                "rank": world.rank,
                "size": world.size,
                "pid": os.getpid(),
                "hostname": os.uname().nodename,
                "addresses": self._server.addresses,
                "mpi": MPI.Get_library_version().split("\n")[0].strip("\0 "),
                "segments": sorted(segments_of()),
            },
            take_fds=False,
        )
        threading.Thread(target=_die_with, args=(self._control,), daemon=True).start()

    def run(self) -> None:
        """Answer commands until told to exit."""
        while True:
            frame = self._control.recv()
            if frame.kind != Kind.COMMAND:
                continue
            body = frame.body
            if body["op"] == "exit":
                for library in self._libraries.values():
                    with contextlib.suppress(Exception):
                        library.close()
                return
            self._reply(body, self._answer(body))

    def _reply(self, body: Body, reply: Body) -> None:
        try:
            self._control.send(Kind.REPLY, reply)
        except (Failure, TypeError, ValueError, OverflowError) as error:  # it cannot be packed
            failure = self._routine_failure(error, body)
            self._control.send(Kind.REPLY, {"seq": body["seq"], "error": failure.to_map()})

    def _answer(self, body: Body) -> Body:
        reply: Body = {"seq": body["seq"]}
        try:
            reply.update(getattr(self, f"_on_{body['op']}")(body) or {})
        except Interrupted:
            reply["interrupted"] = True
        except Failure as failure:
            failure.facts.setdefault("rank", self.gang.rank)
            reply["error"] = failure.to_map()
        except MemoryError as error:
            reply["error"] = Failure(
                "ResourceError",
                f"rank {self.gang.rank} ran out of memory: {error}",
                rank=self.gang.rank,
            ).to_map()
        except BaseException as error:  # a routine may even call sys.exit: the gang goes on
            reply["error"] = self._routine_failure(error, body).to_map()
        if body["op"] in SPEAKING:
            output.flush()
        return reply

    def _routine_failure(self, error: BaseException, body: Body) -> Failure:
        routine = body.get("routine") or body.get("name") or body["op"]
        what = f"{body.get('library', '')}.{routine}".lstrip(".")
        where = error.__traceback__
        while where and where.tb_next and where.tb_frame.f_globals.get("__name__") in NOT_SHOWN:
            where = where.tb_next
        shown = traceback.format_exception(type(error), error, where)
        return Failure(
            "RoutineError",
            f"{what} failed on rank {self.gang.rank}: {type(error).__name__}: {error}",
            rank=self.gang.rank,
            traceback="".join(shown)[-TRACEBACK_LIMIT:],
        )

    def _tell(self, fraction: float, text: str) -> None:
        self._control.send(
            Kind.EVENT, {"seq": self._call, "fraction": float(fraction), "text": text}
        )

    # --- commands, by op ---

    def _on_reserve(self, body: Body) -> Body:
        return {"idle": self.storage.pool.idle_bytes()}

    def _on_create(self, body: Body) -> None:
        distribution = Distribution(body["layout"], tuple(body["shape"]), self.gang.grid)
        matrix = self.storage.new(distribution, np.dtype(body["dtype"]))
        self.storage.put(body["matrix"], matrix, sealed=False)

    def _on_seal(self, body: Body) -> None:
        self.storage.seal(body["matrix"])

    def _on_free(self, body: Body) -> None:
        for matrix_id in body["matrices"]:
            self.storage.free(matrix_id)

    def _on_redistribute(self, body: Body) -> None:
        self._enter(body)
        source = self.storage.sealed(body["source"])
        result = self.gang.to_layout(source, body["layout"])
        self.storage.put(body["matrix"], result, sealed=True)

    def _on_load(self, body: Body) -> Body:
        self._enter(body)
        name = body["library"]
        library = self._loader(name, body.get("path"))
        old = self._libraries.pop(name, None)
        if old is not None:
            old.close()
        self._libraries[name] = library
        return {"value": library.describe()} if self.gang.rank == 0 else {}

    def _on_call(self, body: Body) -> Body:
        self._enter(body)
        library = self._libraries.get(body["library"])
        if library is None:
            raise Failure("LibraryNotFoundError", f"library {body['library']!r} is not loaded")
        arguments = {
            name: self.storage.sealed(value["matrix"]) if isinstance(value, dict) else value
            for name, value in body["arguments"].items()
        }
        results = library.call(self.gang, body["routine"], arguments)
        made = iter(self._keep((r for r in results if isinstance(r, DistMatrix)), body["first"]))
        values, matrices = [], []
        for result in results:
            if isinstance(result, DistMatrix):
                matrices.append(next(made))
                values.append({"matrix": matrices[-1]})
            else:
                values.append(result)
        reply: Body = {"matrices": matrices} if matrices else {}
        if self.gang.rank == 0:
            reply["value"] = values
        return reply

    def _on_run(self, body: Body) -> Body:
        self._enter(body)
        self.gang.check()
        results, value = self._runner.run(self.gang, body, self._folder, self.storage.sealed)
        matrices = self._keep(results, body["first"])
        reply: Body = {"matrices": matrices} if matrices else {}
        if self.gang.rank == 0:
            reply["value"] = value
        return reply

    def _keep(self, results: Iterable[DistMatrix], first: int) -> list[list[Any]]:
        """Store what a call has made, under ids from `first`; what is to be told of it."""
        told = []
        for matrix_id, result in enumerate(results, first):
            self._made.append(matrix_id)
            self.storage.put(matrix_id, result, sealed=True)
            told.append([matrix_id, *result.shape, result.dtype.name, result.layout])
        return told

    def _on_discard(self, body: Body) -> None:
        """Free what the last call has made: it failed on other ranks."""
        for matrix_id in self._made:
            self.storage.free(matrix_id)

    def _enter(self, body: Body) -> None:
        """Before anything collective: waits belong to this call, on a sound communicator."""
        self._call = body["seq"]
        self._made = []
        gang_comm.begin(self._call)
        if body.get("renew"):
            self.gang.renew()
        else:
            self.gang.enter()


def _die_with(control: Connection) -> None:
    """End this rank when its proxy is gone, even while it computes."""
    poller = select.poll()
    poller.register(control.sock.fileno(), 0)  # only hang-up and error are reported
    while True:
        poller.poll()
        os._exit(ORPHANED)


def _speak_through(config: RankConfig, rank: int) -> None:
    """Print to this rank's own pipes, where its launcher has given all ranks the same."""
    for stream in (output.STDOUT, output.STDERR):
        path = own_pipe(config.directory, rank, stream)
        with contextlib.suppress(FileNotFoundError):
            pipe = os.open(path, os.O_WRONLY)
            os.dup2(pipe, stream)
            os.close(pipe)


def _leave(config: RankConfig) -> NoReturn:
    """Tell the proxy that this process is no rank of its gang, and end."""
    mpi = " ".join(MPI.Get_library_version().split("\n")[0].strip("\0 ").split())
    unfit = (
        f"is in an MPI world of {MPI.COMM_WORLD.size} instead of {config.size} ranks: the launcher "
        f"and the MPI library ({mpi}) do not speak the same PMI. {config.advice}".rstrip()
    )
    about = {"role": "rank", "rank": MPI.COMM_WORLD.rank, "pid": os.getpid(), "unfit": unfit}
    if MPI.COMM_WORLD.size == 1:
        MPI.Finalize()  # alone it waits for nobody, and takes its names in /dev/shm away
    connect(config.control, config.token, about, take_fds=False)
    time.sleep(UNFIT_S)  # the proxies end them all; a launcher would at the first one's exit
    os._exit(1)


def tell_world() -> None:
    """Say rank and size of the world that a launcher has started this process in: to try it."""
    MPI.Init()
    sys.stdout.write(json.dumps({"rank": MPI.COMM_WORLD.rank, "size": MPI.COMM_WORLD.size}) + "\n")
    sys.stdout.flush()
    MPI.Finalize()


def main(config: RankConfig, loader: Loader, runner: Runner) -> None:
    """Be a rank until told to exit. Does not return."""
    status = 1
    try:
        faulthandler.enable()
        output.speak_in_lines()
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        threadpool_limits(config.threads)
        if not MPI.Is_initialized():
            # MPI holds the GIL: nothing else ends one that hangs here when its proxy is gone.
            signal.alarm(math.ceil(config.start_timeout_s) + INIT_SLACK_S)
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
            signal.alarm(0)
        if MPI.COMM_WORLD.size != config.size:
            _leave(config)
        _speak_through(config, MPI.COMM_WORLD.rank)
        RankLoop(config, loader, runner).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not MPI_Finalize: it is collective, and would wait for a rank that is gone.
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)
