"""Functions that test_mpi_layer.py runs on the ranks: waits in MPI that end with their call."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from threading import Thread, Timer
from typing import Any

import numpy as np
from mpi4py import MPI

from ali.registry import load
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.rank.gang_view import GangView
from mpi_workers.waits import interruption, mpi_layer
from mpi_workers.waits.interruption import InterruptWord
from tests.mpi_workers.waits.ranks_mpi_layer_methods import METHODS

BIG = 1 << 17  # elements: more than what the layer copies, and than MPI sends at once
Comm = MPI.Intracomm

# Each waits for rank 1, which does not come.
WAITS: dict[str, Callable[[Comm], Any]] = {
    "Allreduce": lambda c: c.Allreduce(np.ones(3), np.ones(3)),
    "Allreduce large": lambda c: c.Allreduce(np.ones(BIG), np.ones(BIG)),
    "allreduce": lambda c: c.allreduce(1),
    "Barrier": lambda c: c.Barrier(),
    "Bcast": lambda c: c.Bcast(np.ones(3), 1),
    "Bcast large": lambda c: c.Bcast(np.ones(BIG), 1),
    "bcast": lambda c: c.bcast(None, 1),
    "Reduce": lambda c: c.Reduce(np.ones(3), np.ones(3)) or c.Barrier(),
    "Gather": lambda c: c.Gather(np.ones(1), np.ones(c.size)) or c.Barrier(),
    "Alltoall": lambda c: c.Alltoall(np.ones(c.size), np.ones(c.size)),
    "Alltoallv": lambda c: c.Alltoallv(*[[np.ones(c.size), [1] * c.size]] * 2),
    "Allgatherv": lambda c: c.Allgatherv(np.ones(1), [np.ones(c.size), [1] * c.size]),
    "Reduce_scatter": lambda c: c.Reduce_scatter(np.ones(c.size), np.ones(1), [1] * c.size),
    "Scan": lambda c: c.Scan(np.ones(1), np.ones(1)) or c.Barrier(),
    "Recv": lambda c: c.Recv(np.ones(3), 1),
    "recv": lambda c: c.recv(source=1),
    "Irecv": lambda c: c.Irecv(np.ones(3), 1).Wait(),
    "irecv": lambda c: c.irecv(source=1).wait(),
    "Waitall": lambda c: MPI.Request.Waitall([c.Irecv(np.ones(3), 1, tag) for tag in (0, 1)]),
    "Waitany": lambda c: MPI.Request.Waitany([c.Irecv(np.ones(3), 1, tag) for tag in (0, 1)]),
    "Waitsome": lambda c: MPI.Request.Waitsome([c.Irecv(np.ones(3), 1, tag) for tag in (0, 1)]),
    "Iallreduce": lambda c: c.Iallreduce(np.ones(3), np.ones(3)).Wait(),
    "Probe": lambda c: c.Probe(1),
    "mprobe": lambda c: c.mprobe(1),
    "Ssend": lambda c: c.Ssend(np.ones(3), 1),
    "Send large": lambda c: c.Send(np.ones(BIG), 1),
    "Sendrecv": lambda c: c.Sendrecv(np.ones(BIG), 1, 0, np.ones(BIG), 1, 0),
    "Sendrecv_replace": lambda c: c.Sendrecv_replace(np.ones(3), 1, 0, 1, 0),
    "sendrecv": lambda c: c.sendrecv("x" * (1 << 20), 1, 0, None, 1, 0),
    "Split": lambda c: c.Split(0),
    "Dup": lambda c: c.Dup(),
    "Create_cart": lambda c: c.Create_cart([c.size]),
    "Win.Create": lambda c: MPI.Win.Create(np.ones(3), 8, comm=c),
    "File.Open": lambda c: MPI.File.Open(c, "/dev/null"),
    "Win.Fence": lambda c: WINDOWS[c.rank].Fence(),
}  # fmt: skip
WINDOWS: dict[int, MPI.Win] = {}
FATAL = ("Recv", "Allreduce", "Barrier", "Waitall")
STOPS = 30
ERROR = {"careless": False, "fault": "error", "fortran": False}  # of rank 1, in C


def ends(gang: GangView, path: str) -> dict[str, Any]:
    """Rank 1 does not take part in a wait, and ends the call; then all go on.

    Returns for each wait: whether all others left it with `Interrupted`, the longest time that
    it took, whether what follows is right, and the name that they reported.
    """
    word = InterruptWord(path)
    interruption.watch(word, crowded=gang.size > 2)
    found: dict[str, Any] = {}
    for call, (name, wait) in enumerate(WAITS.items(), start=2):
        with interruption.uninterruptible():
            interruption.begin(call)
            gang.renew()
            if name in FATAL:  # as a library sets it that makes a communicator of its own
                gang.comm.Set_errhandler(MPI.ERRORS_ARE_FATAL)
            gang.world.Barrier()
        if name == "Win.Fence":
            WINDOWS[gang.rank] = MPI.Win.Create(np.ones(3), 8, comm=gang.comm)
        raised, left, freed = 0.0, 0.0, True
        if gang.rank == 1:
            time.sleep(0.02)
            raised = time.monotonic()  # one clock for all processes of a machine
            word.raise_to(call)
        else:
            try:
                with interruption.EndedWaits():
                    wait(gang.comm)
                freed = False
            except Interrupted:
                left = time.monotonic()
        with interruption.uninterruptible():
            interruption.begin(call + 1000)
            gang.renew()
        total = gang.comm.allreduce(gang.rank)
        buffer = np.zeros(2)
        gang.comm.Allreduce(np.full(2, float(gang.rank)), buffer)
        right = total == sum(range(gang.size)) and bool((buffer == total).all())
        found[name] = [
            gang.comm.allreduce(freed, MPI.LAND),
            gang.comm.allreduce(left, MPI.MAX) - gang.comm.allreduce(raised, MPI.MAX),
            gang.comm.allreduce(right, MPI.LAND),
        ]
    return found


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def agreement(gang: GangView, crowded: bool) -> dict[str, bool]:
    """For every method: whether all ranks get through the layer what MPI's own gives."""
    with interruption.uninterruptible():
        own = gang.world.Dup()
    interruption.start_layer(gang.world, wanted=True)
    mpi_layer.state().crowded = crowded
    found: dict[str, bool] = {}
    for name, method in METHODS.items():
        with interruption.uninterruptible():
            expected = repr(_plain(method(own)))
        same = repr(_plain(method(gang.comm))) == expected
        found[name] = gang.comm.allreduce(same, MPI.LAND)
    return found


def _joined(a: Any, b: Any, datatype: Any) -> None:
    """An operation that is not commutative."""
    x, y = np.frombuffer(a, "f8"), np.frombuffer(b, "f8")
    y[:] = 2 * x + y


def _random_call(c: Comm, kind: int, n: int, dtype: str, op: MPI.Op, root: int, here: bool) -> Any:
    """A collective of n elements a rank, in place if `here`; the memory into which it wrote."""
    x = (np.arange(n * c.size) * (c.rank + 3) % 17 + c.rank).astype(dtype)
    y, mine = x.copy(), slice(c.rank * n, (c.rank + 1) * n)
    every, own, at_root = x.copy(), x[:n].copy(), c.rank == root
    sent: Any = MPI.IN_PLACE if here else own
    match kind:
        case 0:
            c.Allreduce(sent, y[:n], op)
        case 1:
            c.Reduce(sent if at_root else own, y[:n], op, root)
        case 2:
            c.Bcast(y[:n], root)
        case 3:
            c.Allgather(sent, y)
        case 4:
            c.Gather(sent if at_root else own, y if at_root else None, root)
        case 5:
            c.Scatter(y if at_root else None, MPI.IN_PLACE if here and at_root else own, root)
            y[mine] = own
        case 6:
            c.Alltoall(MPI.IN_PLACE if here else every, y)
        case 7:
            (c.Scan if here else c.Exscan)(MPI.IN_PLACE if here else own, y[:n], op)
        case 8:
            c.Reduce_scatter_block(MPI.IN_PLACE if here else every, y if here else y[:n], op)
            y[n:] = 0
        case 9 if n:  # the same elements in another type on some ranks
            other = MPI._typedict[np.dtype(dtype).char].Create_vector(n, 1, 2).Commit()
            y = np.zeros(2 * n, dtype)
            y[: n if at_root else None] = 1 + c.rank
            c.Bcast([y, n] if at_root else [y, 1, other], root)
            other.Free()
        case _:
            c.Barrier()
    return y


def in_any_order(gang: GangView, calls: int, crowded: bool, seed: int) -> list[Any]:
    """Random calls, on random parts, of ranks that are late: those that differ from MPI's own."""
    mpi_layer.state().crowded = crowded
    random, wrong = np.random.default_rng(seed), []
    noncommutative = MPI.Op.Create(_joined, commute=False)
    with interruption.uninterruptible():
        comms = [(gang.comm, gang.world.Dup())]
    for number in range(calls):
        dtype = str(random.choice(["f8", "i4", "u1", "c16"]))
        ops = [
            MPI.SUM,
            MPI.PROD,
            *([MPI.MAX] * (dtype != "c16")),
            *([noncommutative] * (dtype == "f8")),
        ]
        kind, n, root = (
            int(random.integers(most)) for most in (11, random.choice([2, 4, 9, 99]), 4)
        )
        op, here, late = (
            ops[random.integers(len(ops))],
            bool(random.integers(2)),
            random.integers(90),
        )
        which, colours = random.integers(len(comms)), random.integers(2, size=gang.size)
        if late == gang.rank:
            time.sleep(0.002)
        layer, plain = comms[which]
        call = kind, n, dtype, op, root % layer.size, here
        if late > 80 and which:  # not the gang's own
            layer.Free()
            del comms[which]
        elif late > 70 and len(comms) < 6:
            colour = int(colours[gang.rank])
            made = layer.Split(colour)
            with interruption.uninterruptible():
                comms.append((made, plain.Split(colour)))
        else:
            found = _random_call(layer, *call)
            with interruption.uninterruptible():
                expected = _random_call(plain, *call)
            if found.tobytes() != expected.tobytes():
                wrong.append([number, int(which), layer.size, kind, n, dtype, here])
    return [one for each in gang.comm.allgather(wrong) for one in each]


def freed(gang: GangView) -> list[float]:
    """What a late rank gets on communicators that another has left and freed."""
    mpi_layer.state().crowded = False
    comm, got = gang.comm, []
    for turn in range(5):
        first, second = comm.Split(int(comm.rank > 1)), comm.Split(int(comm.rank == 1))
        x = np.full(2, turn + 10.0 * comm.rank)
        if comm.rank == 1:
            time.sleep(0.02)
        if comm.rank < 2:
            first.Bcast(x, 0)
            first.Free()
        if comm.rank != 1:
            second.Bcast(np.full(2, 99.0), 0)
            second.Free()
        got.append(float(comm.bcast(x[0], 1)))
    return got


def not_yet(gang: GangView, path: str) -> list[Any]:
    """An interrupt of an earlier call does not end this one; one of this call does."""
    word = InterruptWord(path)
    interruption.watch(word, crowded=True)
    interruption.begin(7)
    word.raise_to(6)
    earlier = interruption.interrupted()
    total = gang.comm.allreduce(1)
    with interruption.uninterruptible():
        gang.comm.Barrier()
    word.raise_to(7)
    word.raise_to(3)
    return [earlier, total, interruption.interrupted()]


def communicators(gang: GangView, path: str) -> list[Any]:
    """The failed calls that use up a communicator, and the message when no more can be made."""
    first = gang.comm
    gang.enter()
    gang.renew()  # the call that failed had not looked at it
    same = gang.comm is first
    gang.enter()
    if gang.rank == 1:
        assert gang.comm is first
    gang.renew()  # one rank had
    other = gang.comm is not first
    # Most of MPI's communicators are taken without messages: on busy cores each message takes long.
    taken = [MPI.COMM_SELF.Dup() for _ in range(1500)]
    count, said = len(taken), ""
    try:
        while count < 3000:
            assert gang.comm is not first
            gang.renew()
            count += 1
    except Failure as failure:
        said = f"{failure.kind}: {failure}"
    gang.enter()
    total = np.zeros(1)
    gang.comm.Allreduce(np.ones(1), total)
    refused = ""
    try:
        gang.comm.Free()
    except MPI.Exception as error:
        refused = str(error)
    return [same, other, count, said, total[0], refused]


def _started(comm: Comm, x: Any) -> None:
    request = comm.Recv_init(x)
    request.Start()
    request.Wait()


CANARY = 7.0
OPERATIONS: dict[str, Callable[[Comm, Any, Any], Any]] = {
    "Allreduce": lambda c, x, y: c.Allreduce(x, y[: len(x)]),
    "Allgather": lambda c, x, y: c.Allgather(x, y),
    "Alltoall": lambda c, x, y: c.Alltoall(y.copy(), y),
    "Allgatherv": lambda c, x, y: c.Allgatherv(x, [y, [len(x)] * c.size]),
    "Gather": lambda c, x, y: c.Gather(x, y),
    "Reduce": lambda c, x, y: c.Reduce(x, y[: len(x)]) or c.Barrier(),
    "Bcast": lambda c, x, y: c.Bcast(x, 2) or c.Barrier(),
    "Recv": lambda c, x, y: c.Recv(x) if c.rank == 0 else c.Send(x, 0),
    "Recv_init": lambda c, x, y: _started(c, x) if c.rank == 0 else c.Send(x, 0),
    "Irecv": lambda c, x, y: (c.Irecv(x) if c.rank == 0 else c.Isend(x, 0)) and c.Barrier(),
    "Sendrecv": lambda c, x, y: c.Sendrecv(y[: len(x)], (c.rank + 2) % c.size, 0, x),
}


def nearly_complete(gang: GangView, path: str) -> list[Any]:
    """By rank: what it has gathered, and why it may not go on. The others come 40 ms after the word
    of rank 0 is raised, as ranks that had no core."""
    word = InterruptWord(f"{path}{gang.rank}")
    interruption.watch(word, crowded=True)
    interruption.begin(2)
    gang.world.Barrier()
    if gang.rank == 0:
        Timer(0.02, word.raise_to, [2]).start()
    else:
        time.sleep(0.06)
    found = np.zeros(gang.size)
    with contextlib.suppress(Interrupted), interruption.EndedWaits():
        gang.comm.Allgatherv(np.full(1, gang.rank, float), [found, [1] * gang.size])
    with interruption.uninterruptible():
        return gang.world.allgather([found.tolist(), interruption.unsafe()])


def canaries(gang: GangView, path: str) -> list[list[str]]:
    """Operations that were left and that MPI goes on with in later calls, and those that say so.

    The first list: those into whose memory it has written without a word. Rank 0 leaves an
    operation before ranks 2 and 3 begin it, whose word is raised later: their messages arrive
    then. Rank 1 does not take part.
    """
    word = InterruptWord(f"{path}{gang.rank}")
    interruption.watch(word, crowded=True)
    kept: list[Any] = []
    state = mpi_layer.state()
    for number, (name, size) in enumerate(itertools.product(OPERATIONS, (5, 100_000)), start=2):
        with interruption.uninterruptible():
            interruption.begin(number)
            gang.renew()
            gang.world.Barrier()
        x, y = np.ones(size), np.ones(size * gang.size)
        if gang.rank > 1:
            time.sleep(0.1)
        Timer(0.0 if gang.rank == 1 else 0.05, word.raise_to, [number]).start()
        if gang.rank != 1:
            with contextlib.suppress(Interrupted), interruption.EndedWaits():
                OPERATIONS[name](gang.comm, x, y)
        x[:] = y[:] = CANARY
        kept.append((f"{name} of {size}", x, y, bool(interruption.unsafe())))
        state.unsafe = None
    interruption.begin(1000)
    with interruption.uninterruptible():
        gang.renew()
    for _ in range(1000):
        gang.comm.allreduce(1)
        gang.comm.sendrecv(1, (gang.rank + 1) % gang.size, source=MPI.ANY_SOURCE)
    silent = [name for name, x, y, said in kept if not said and {*x, *y} != {CANARY}]
    told = [name for name, _, _, said in kept if said]
    return [sorted(set().union(*gang.comm.allgather(names))) for names in (silent, told)]


def leaks(gang: GangView, path: str, library: str | None) -> list[Any]:
    """Communicators that 200 calls have left which were ended in a wait; why the rank must end.

    In Python, or in a library in C.
    """
    word = InterruptWord(path)
    interruption.watch(word, crowded=gang.size > 2)
    waits: list[Callable[[Comm], Any]] = [WAITS["Allreduce"], WAITS["Waitall"]]
    if library is not None:
        loaded = load("waiting", library)
        waits = [
            lambda comm, how=how: loaded.call(gang, "wait", {**ERROR, "how": how})
            for how in ("Recv", "Allreduce_c")
        ]
    for number in range(2, 202):
        with interruption.uninterruptible():
            interruption.begin(number)
            gang.renew()
            gang.world.Barrier()
        if gang.rank == 1:
            word.raise_to(number)
        else:
            with contextlib.suppress(Interrupted), interruption.EndedWaits():
                waits[number % 2](gang.comm)
    interruption.begin(1000)
    with interruption.uninterruptible():
        gang.renew()
    spare = []
    try:
        while len(spare) < 3000:
            spare.append(MPI.COMM_SELF.Dup())
    except MPI.Exception:
        pass
    for comm in spare:
        comm.Free()
    return [gang.comm.allreduce(len(spare), MPI.MIN), interruption.unsafe()]


def starts(gang: GangView) -> list[Any]:
    """Whether the layer starts where a rank does not want it."""
    state, found = mpi_layer.state(), []
    for wanted in (True, gang.rank != 1):
        state.active = 0
        said = interruption.start_layer(gang.world, wanted=wanted)
        found.append(gang.world.allgather([said, bool(state.active)]))
    return found


def without_a_core(gang: GangView, path: str, crowded: bool) -> int:
    """Ranks get a core only after the others have left a call; the number of such calls."""
    word = InterruptWord(path)
    interruption.watch(word, crowded=crowded)
    pids = gang.world.allgather(os.getpid())
    counts = [np.ones(gang.size), [1] * gang.size]

    def end(number: int) -> None:
        stopped = pids[(2, 3, 0)[number % 3]]
        time.sleep(0.02)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(0.02)
        word.raise_to(number)
        time.sleep(0.25)
        os.kill(stopped, signal.SIGCONT)

    for number in range(2, 2 + STOPS):
        with interruption.uninterruptible():
            interruption.begin(number)
            gang.renew()
            gang.world.Barrier()
        stopping = Thread(target=end, args=[number])
        if gang.rank == 1:
            stopping.start()
        with contextlib.suppress(Interrupted), interruption.EndedWaits():
            while True:
                gang.comm.Alltoallv(counts, counts)
        if gang.rank == 1:
            stopping.join()
    interruption.begin(1000)
    with interruption.uninterruptible():
        gang.renew()
    return int(gang.comm.allreduce(STOPS) // gang.size)


def native(gang: GangView, path: str, word_path: str, cases: list[list[Any]]) -> list[Any]:
    """What each rank says of waits in native code for rank 1, which fails, and the longest time."""
    word = InterruptWord(word_path)
    interruption.watch(word, crowded=gang.size > 2)
    library = load("waiting", path)
    found = []
    for number, (how, careless) in enumerate(cases, start=2):
        with interruption.uninterruptible():
            interruption.begin(number)
            gang.renew()
            gang.world.Barrier()
        begun = time.monotonic()
        try:
            library.call(gang, "wait", {**ERROR, "how": how, "careless": careless})
            said = "returned"
        except Failure as failure:
            said = failure.message
            time.sleep(0.02)
            word.raise_to(number)
        except Interrupted as interrupted:
            said = interrupted.place
        seconds = time.monotonic() - begun
        with interruption.uninterruptible():
            interruption.begin(number + 1000)
            gang.renew()
        total = gang.comm.allreduce(1)
        slowest = gang.comm.allreduce(seconds, MPI.MAX)
        found.append([gang.comm.allgather(said), slowest, total])
    return found
