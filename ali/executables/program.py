"""Runs an MPI program on the ranks of a gang: each starts a process, serves it PMI and matrices.

The processes find each other through PMI-1, as under mpiexec. A rank answers its own process; what
all of them must reach, a barrier of PMI or the end, the ranks agree on over the gang's
communicator. While their processes compute, the ranks sleep.

The program maps the memory of its rank's part, so no element is copied. Requests and replies are
the structs of the header, on a Unix socket that only the two processes have.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import os
import pickle
import socket
import sys
import tempfile
import time
import uuid
from bisect import bisect
from collections.abc import Callable, Mapping
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from ali.executables.process import (
    Child,
    environment,
    is_open_mpi,
    located,
    mpi_of,
    mpirun_command,
    ready,
    runs_open_mpi,
    showing_waits,
    with_gangs_mpi,
    working_folder,
)
from ali.native.host import STRUCTURES, declared, described
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.layout import layout_of
from mpi_workers.wire.pmi import PmiNode, process_mapping, segment_names

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_workers.rank.gang_view import GangView


ATTACH, CREATE = 1, 2
ANSWER_S = 10.0  # time limit for a program to read answers that have filled its socket
CALLS_VERSION = 2


CLIENT = declared("alchemist_client.h", STRUCTURES)
Request, Reply = CLIENT["alchemist_client_request"], CLIENT["alchemist_client_reply"]


class MatrixService:
    """One rank's matrices for its program.

    Attributes
    ----------
    child_end : socket
        The program inherits it.
    made : dict of str to DistMatrix
        The matrices that the program has created, in the order of their names.
    """

    def __init__(self, gang: GangView, given: Mapping[str, DistMatrix]) -> None:
        self._gang = gang
        self._given = given
        self._made: dict[str, DistMatrix] = {}
        self._socket, self.child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)

    @property
    def made(self) -> dict[str, DistMatrix]:
        return dict(sorted(self._made.items()))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        self.child_end.close()

    def serve(self) -> bool:
        """Answer one request; False at the end of the program."""
        try:
            data = self._socket.recv(2 * ctypes.sizeof(Request))
            if not data:
                return False
            reply, descriptors = self._answer(data)
            socket.send_fds(self._socket, [bytes(reply)], descriptors)
        except ConnectionError:
            return False
        return True

    def _answer(self, data: bytes) -> tuple[Any, list[int]]:
        try:
            matrix = self._matrix(data)
            segment = matrix.block.segment
            if segment.fd < 0:
                raise ValueError("its memory on this rank is not shared")
            reply = Reply(nbytes=segment.nbytes, matrix=described(matrix))
            return reply, [segment.fd]
        except (ValueError, Failure) as error:
            return Reply(failed=1, message=str(error).encode()[:511]), []

    def _matrix(self, data: bytes) -> DistMatrix:
        if (
            len(data) != ctypes.sizeof(Request)
            or int.from_bytes(data[:4], "little") != CALLS_VERSION
        ):
            raise ValueError(
                "the program was compiled with another version of alchemist_client.h: compile it "
                "with that of `alchemist include`"
            )
        request = Request.from_buffer_copy(data)
        name = request.name.decode(errors="replace")
        known = {**self._given, **self._made}
        if request.operation == ATTACH:
            if name not in known:
                names = ", ".join(sorted(known)) or "none"
                raise ValueError(f"there is no matrix {name!r}: run_program was given {names}")
            _check_expected(known[name], request)
            return known[name]
        if name in known or not name:
            raise ValueError(f"a matrix {name!r} cannot be created: the name is empty or in use")
        made = self._gang.new(*_shape_and_kind(request))
        self._made[name] = made
        return made


def _check_expected(matrix: DistMatrix, request: Any) -> None:
    """Refuse a matrix whose elements the program would read wrongly; 0: it takes any."""
    if request.dtype:
        dtype = _dtype(request)
        if matrix.dtype.name != dtype:
            raise ValueError(
                f'it is {matrix.dtype}, and the program expects {dtype}: pass astype("{dtype}") '
                "of it"
            )
    if request.layout and (layout := layout_of(request.layout)) != matrix.layout:
        raise ValueError(
            f"it is in layout {matrix.layout}, and the program expects {layout}: pass "
            f'to_layout("{layout}") of it'
        )


def _dtype(request: Any) -> str:
    if not 0 < request.dtype <= len(DTYPES):
        raise ValueError(f"dtype {request.dtype} does not exist")
    return DTYPES[int(request.dtype) - 1]


def _shape_and_kind(request: Any) -> tuple[tuple[int, ...], str, str]:
    if request.dimensions not in (1, 2) or request.rows < 0 or request.cols < 0:
        raise ValueError(f"{request.rows} x {request.cols} is not a shape")
    shape = (request.rows, request.cols)[: request.dimensions]
    return shape, _dtype(request), layout_of(request.layout)


CHECK_S = 0.1  # between two looks whether the call was cancelled
AGREE_S = 0.0002  # between two looks whether all ranks have arrived; doubles up to the limit
AGREE_LIMIT_S = 0.01
READ_BYTES = 64 << 10
LEFT_S = 1.0  # from the end of a process without MPI_Finalize to that of all others
BARRIER, ENDED = "barrier", "ended"


def run_program(
    gang: GangView, task: dict[str, Any], matrix: Callable[[Any], DistMatrix]
) -> dict[str, Any]:
    """Run a program on all ranks; the exit codes, by rank, and the matrices that it has made.

    Raises
    ------
    Failure
        BadArgumentError, if it cannot be started; RoutineError, if it fails on a rank.
    """
    given = {name: matrix(ident) for name, ident in task["matrices"].items()}
    with contextlib.ExitStack() as closing:
        streams: dict[str, int] = {}
        if task["given"] and gang.rank == 0:
            file = closing.enter_context(tempfile.TemporaryFile(dir=gang.folder))
            file.write(task["given"][0])
            file.seek(0)
            streams["stdin"] = file.fileno()
        program = Program(gang, gang.own_comm, task, given, closing, **streams)
        while (codes := program.turn()) is None:
            pass
    return {"exit_codes": codes, "matrices": program.service.made}


class Program:
    """One rank's process of a program, and its part in the agreement of all ranks.

    Parameters
    ----------
    gang : GangView
    comm : MPI.Intracomm
        Ranks that have reached a point wait on it, in a collective operation; so the caller uses
        another one until `turn` has returned the exit codes.
    task : dict
        ``name``, ``argv``, ``env``, ``cwd``, ``cwd_needed``, ``check`` (whether an exit code other
        than 0 is an error).
    given : mapping of str to DistMatrix
        Matrices that the program may attach to.
    closing : ExitStack
        Ends the process, and removes what it may leave.
    **streams : int
        File descriptors `stdin` (default: none), `stdout`, `stderr` (default: those of the rank).

    Attributes
    ----------
    serve : dict of int to callable
        For each descriptor, what to do when it is readable; it returns False at its end.
    service : MatrixService
    ended : bool
        Whether the process of this rank has ended without an error.
    """

    def __init__(
        self,
        gang: GangView,
        comm: MPI.Intracomm,
        task: dict[str, Any],
        matrices: Mapping[str, DistMatrix],
        closing: contextlib.ExitStack,
        **streams: int,
    ) -> None:
        self._gang = gang
        self._name = task["name"]
        self._checks_exit = task["check"]
        self._agreement = _Agreement(gang, comm)
        self._aborted: int | None = None
        self._codes: list[int] | None = None
        self._unread = b""
        self._in_mpi = False
        self._left_s = math.inf  # when the process has ended without MPI_Finalize
        self._next_look_s = 0.0  # at the memory of the process; its output has turns of its own
        self.ended = False
        place = f"{os.uname().nodename} {gang.folder}"  # a node's proxy has a folder of its own
        places, names = zip(*comm.allgather((place, uuid.uuid4().hex)), strict=True)
        counts = [len(list(same)) for _, same in groupby(places)]
        kvs_name = f"alchemist-{names[0]}"
        self._pmi = PmiNode(
            kvs_name,
            gang.size,
            [gang.rank],
            process_mapping(counts),
            send=self._answer,
            barrier=self._reach_barrier,
            abort=self._abort,
            say=lambda rank, text: sys.stderr.write(f"{text}\n"),
        )
        # Noted, because a rank that is killed cannot remove what its process has left.
        node = bisect(list(accumulate(counts)), gang.rank)
        segments = segment_names(kvs_name, node)
        closing.enter_context(gang.segments(segments))
        self._pmi_socket, pmi_end = (closing.enter_context(end) for end in socket.socketpair())
        self._pmi_socket.settimeout(ANSWER_S)
        self.service = closing.enter_context(contextlib.closing(MatrixService(gang, matrices)))
        self._child = self._start(task, counts, pmi_end, streams)
        pmi_end.close()
        self.service.child_end.close()
        self.serve: dict[int, Callable[[], bool]] = {}
        closing.callback(gang.forget_program)
        if self._child is None:
            self._agreement.begin((ENDED, 0))
            return
        closing.callback(self._child.end)
        self.serve = {
            self._pmi_socket.fileno(): self._serve_pmi,
            self.service.fileno(): self.service.serve,
            self._child.pidfd: self._end_of_process,
        }

    def _start(
        self,
        task: dict[str, Any],
        counts: list[int],
        pmi_end: socket.socket,
        streams: dict[str, int],
    ) -> Child | None:
        """Start the process; None if rank 0's mpirun starts it."""
        rank = self._gang.rank
        env = environment(task["env"])
        cwd = working_folder(task, rank)
        file = located(task, env, cwd, rank)
        command = [str(file), *task["argv"][1:]]
        library, found = mpi_of(file)
        if is_open_mpi(library):
            command = mpirun_command(file, library, task, counts)
            if rank != 0:
                return None
        else:
            if library and found is None:
                env = with_gangs_mpi(env)
            if library:
                env = showing_waits(env, file, self._gang.program_variables())
            env |= {
                "PMI_FD": str(pmi_end.fileno()),
                "PMI_RANK": str(rank),
                "PMI_SIZE": str(self._gang.size),
                "ALCHEMIST_CLIENT_FD": str(self.service.child_end.fileno()),
            }
        try:
            return Child(command, env, cwd, (pmi_end, self.service.child_end), **streams)
        except OSError as error:
            raise Failure(
                "BadArgumentError",
                f"program {file} cannot be started on {os.uname().nodename} (rank {rank}): "
                f"{error.strerror}. It must be an executable for this kind of processor, or a "
                "script that begins with #!",
            ) from error

    @property
    def agreeing(self) -> bool:
        """Whether the process has reached a barrier of PMI or its end, and others may not have."""
        return self._agreement.under_way

    def turn(self, limit_s: float = CHECK_S) -> list[int] | None:
        """Wait, at most `limit_s`, and serve the process; the exit codes of all ranks at the end.

        Raises
        ------
        Failure
            RoutineError, if the process fails.
        Interrupted
            If the call has failed on another rank or was cancelled.
        """
        try:
            self._gang.check()
            for descriptor in ready(self.serve, min(limit_s, self._agreement.interval_s)):
                if not self.serve[descriptor]():
                    del self.serve[descriptor]
            self._refuse_singletons()
            arrived = self._agreement.reached()
        except Interrupted as interrupted:
            interrupted.place = self._place()
            raise
        if arrived is not None and all(kind == ENDED for kind, _ in arrived):
            self._codes = [code for _, code in arrived]
        elif time.monotonic() > self._left_s + LEFT_S:
            raise Failure(
                "RoutineError",
                f"program {self._name} exited with code 0 on rank {self._gang.rank} without "
                "MPI_Finalize, and did not end on all other ranks, which may wait for it",
                rank=self._gang.rank,
                exit_code=0,
            )
        elif arrived is not None:
            self._release(arrived)
        return self._codes

    def _refuse_singletons(self) -> None:
        """Raise `Failure` if the process has loaded Open MPI by itself: it knows no other ranks."""
        child = self._child
        if child is None or self.ended or self._in_mpi or self._gang.size == 1:
            return
        if (now := time.monotonic()) < self._next_look_s:
            return
        self._next_look_s = now + CHECK_S
        if runs_open_mpi(child.pid):
            raise Failure(
                "RoutineError",
                f"program {self._name} initialised Open MPI on rank {self._gang.rank}, without "
                f"Open MPI's mpirun: each of its {self._gang.size} processes is alone in its "
                "MPI_COMM_WORLD. In a gang of one rank start mpirun as the program, "
                f'["mpirun", "-n", "{self._gang.size}", ...], or install what the program loads '
                "(mpi4py, h5py, ...) for the gang's MPI",
                rank=self._gang.rank,
            )

    def _place(self) -> str:
        """Where this rank's process is, in words."""
        if self._child is None or self.ended:
            return f"the wait for the processes of program {self._name} on other ranks"
        if self._agreement.under_way:
            return f"MPI_Init or MPI_Finalize of program {self._name}"
        function = self._gang.program_waits_in()
        return f"{function} of program {self._name}" if function else f"program {self._name}"

    def _release(self, arrived: list[Any]) -> None:
        """All ranks have reached a barrier of PMI: pass on the keys of all."""
        if gone := [rank for rank, (kind, _) in enumerate(arrived) if kind == ENDED]:
            raise Failure(
                "RoutineError",
                f"program {self._name} has ended without an error on rank "
                f"{', '.join(map(str, gone))}, but waits for all ranks on the others: each of its "
                "processes must call MPI_Init and MPI_Finalize, or none",
                rank=gone[0],
            )
        self._pmi.release({key: value for _, puts in arrived for key, value in puts.items()})

    def _serve_pmi(self) -> bool:
        try:
            data = self._pmi_socket.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if line.startswith((b"cmd=init", b"cmd=finalize")):
                self._in_mpi = line.startswith(b"cmd=init")
            self._pmi.line(self._gang.rank, line.decode(errors="replace"))
        if self._aborted is not None:
            raise Failure(
                "RoutineError",
                f"program {self._name} called MPI_Abort on rank {self._gang.rank}, with code "
                f"{self._aborted}",
                rank=self._gang.rank,
                exit_code=self._aborted,
            )
        return bool(data)

    def _answer(self, _rank: int, line: str) -> None:
        with contextlib.suppress(ConnectionError):  # its end is noticed by its pidfd
            self._pmi_socket.sendall(f"{line}\n".encode())

    def _reach_barrier(self, puts: dict[str, str]) -> None:
        self._agreement.begin((BARRIER, puts))

    def _abort(self, _rank: int, code: int) -> None:
        self._aborted = code

    def _end_of_process(self) -> bool:
        assert self._child is not None
        self._serve_rest()
        status = self._child.status()
        code = os.waitstatus_to_exitcode(status)
        in_barrier = self._agreement.under_way
        if in_barrier or code < 0 or (code != 0 and self._checks_exit):
            function = self._gang.program_waits_in()
            where = f" in {function}" if function else ""
            if in_barrier:
                where = " while it waited for the other ranks in MPI_Init or MPI_Finalize"
            raise Failure(
                "RoutineError",
                f"program {self._name} {self._gang.end_of_program(status)} on rank "
                f"{self._gang.rank}{where}",
                rank=self._gang.rank,
                exit_code=code,
            )
        self.ended = True
        if self._in_mpi:
            self._left_s = time.monotonic()
        self._agreement.begin((ENDED, code))
        return False

    def _serve_rest(self) -> None:
        """Read the last messages of the ended process: among them may be MPI_Abort's."""
        while ready([self._pmi_socket.fileno()], 0.0) and self._serve_pmi():
            pass


_under_way: set[_Agreement] = set()  # MPI may write into their memory also after the call


class _Agreement:
    """A point that the processes of all ranks have to reach.

    The wait sleeps between looks: a process may compute for hours before it reaches the point. No
    step of it blocks, because a rank may give up and end its process.

    Attributes
    ----------
    interval_s : float
        The next look is due after this time.
    """

    def __init__(self, gang: GangView, comm: MPI.Intracomm) -> None:
        self._gang = gang
        self._comm = comm
        self._size = np.empty(1, np.int64)
        self._sizes = np.empty(comm.size, np.int64)
        self._message = b""
        self._told: bytearray | None = None
        self._request: Any = None
        self.interval_s = CHECK_S

    @property
    def under_way(self) -> bool:
        return self._request is not None

    def begin(self, message: Any) -> None:
        """This rank's process has reached the point."""
        self._message = pickle.dumps(message)
        self._told = None
        self.interval_s = AGREE_S
        self._size[0] = len(self._message)
        self._started(self._comm.Iallgather(self._size, self._sizes))

    def _started(self, request: MPI.Request) -> None:
        _under_way.add(self)
        self._gang.keeps_memory(request)
        self._request = request

    def reached(self) -> list[Any] | None:
        """The messages of all ranks, if all have reached it."""
        if self._request is None:
            return None
        try:
            arrived = self._request.Test()
        except Exception:
            self._gang.check()  # it was the end of the call that ended this wait, too
            raise
        if not arrived:
            self.interval_s = min(2 * self.interval_s, AGREE_LIMIT_S)
            return None
        if self._told is None:
            self._told = bytearray(self._sizes.sum())
            self._started(self._comm.Iallgatherv(self._message, [self._told, self._sizes]))
            self.interval_s = AGREE_S
            return None
        self._request = None
        _under_way.discard(self)
        self.interval_s = CHECK_S
        told = io.BytesIO(self._told)
        return [pickle.load(told) for _ in self._sizes]
