"""Reports of a session: gangs, their ranks and their calls; the name of this process in them."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.errors import AlchemistError
from alchemist_ray.plural import counted
from mpi_workers.matrix.sizes import readable
from mpi_workers.wire.frames import Body

NOT_ANSWERING = "not answering"
PROCESS = re.compile(r" \(pid \d+\)")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A rank of a gang: where it runs, the GPUs that it sees, and whether it is idle or busy."""

    rank: int
    node_id: str
    hostname: str
    address: str
    pid: int
    status: str
    gpus: str = ""


def workers_of(connection: GangConnection) -> list[WorkerInfo]:
    """The ranks of a gang. Raises what ended it."""
    found = connection.request({"op": "ping", "wait": True, "workers": True})
    status = "busy" if found["busy"] else "idle"
    return [WorkerInfo(**about, status=status) for about in found["workers"]]


def workers_table(workers: Sequence[WorkerInfo]) -> str:
    """The ranks of a gang, a line for each."""
    lines = [f"Allocated {counted(len(workers), 'worker')}:"]
    lines += [
        f"  rank {worker.rank} on {worker.hostname} at {worker.address} (pid {worker.pid})"
        + (f", GPUs {worker.gpus}" if worker.gpus else "")
        for worker in workers
    ]
    return "\n".join(lines)


def gang_html(connection: GangConnection) -> str:
    """A table of a gang for notebooks: workers by node, matrices and their memory."""
    try:
        workers = workers_of(connection)
        matrices = connection.request({"op": "list_matrices", "names": []})["matrices"]
    except AlchemistError as error:
        return f"<pre>{html.escape(str(error))}</pre>"
    held = [math.prod(about["shape"]) * np.dtype(about["dtype"]).itemsize for about in matrices]
    nodes = Counter(worker.hostname for worker in workers)
    rows = {
        "gang": f"{html.escape(connection.address.gang)} (epoch {connection.address.epoch})",
        "workers": f"{len(workers)}, {workers[0].status}",
        "nodes": ", ".join(f"{html.escape(name)}: {count}" for name, count in nodes.items()),
        "matrices": f"{len(held)}, {readable(sum(held))}",
    }
    cells = "".join(f"<tr><th>{key}</th><td>{text}</td></tr>" for key, text in rows.items())
    return f"<table>{cells}</table>"


@dataclass(frozen=True, slots=True)
class CallInfo:
    """A call of a gang: its routine or function, its state, and its age.

    `state` is ``"running"``, ``"queued"``, or a text for a call that was cancelled or has failed,
    and that ranks are still in. `caller` is the process that waits for it; empty for calls that
    came through Ray. `waits_in` names the ranks that wait for others in MPI, by function:
    ``{"MPI_Recv": [0, 2]}``; only `AlchemistSession.list_calls` asks for it. `running_s` are the
    seconds since its turn came, None while it waits. A call of `AlchemistSession.submit` has an
    `id` and may have a `label`; when it is over, its state is ``"done"``, ``"failed"`` or
    ``"cancelled"``, and the times are those of its end.
    """

    name: str
    state: str
    caller: str
    age_s: float
    waits_in: dict[str, list[int]] = field(default_factory=dict, hash=False)
    running_s: float | None = None
    id: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class GangInfo:
    """An entry of the catalogue of gangs.

    Attributes
    ----------
    name : str
        The gang's name, or its id.
    state : str
        One of `GangState`, or ``"not answering"``.
    owner : str
        The process that started it: ``user@host (pid 123)``.
    workers : int
        Ranks.
    gpus_per_worker : float
    env : tuple of str
        Names of the environment variables that its ranks were given.
    nodes : tuple of str
        Host names.
    named, detached : bool
    created, last_used : float
        Times, in seconds since the epoch of Unix.
    idle_timeout_s : float or None
    processes : tuple of str
        Those with a session on the gang.
    calls : tuple of CallInfo
        The call that runs, then those that are queued.
    ended_calls : dict of str to dict
        By user: how many calls of `AlchemistSession.submit` are over and kept, by state.
    matrices, nbytes : int
        Number of matrices, and bytes of all of them.
    libraries : tuple of str
    free_nbytes : int or None
        Free memory of its nodes; None if it was not asked for, or a node does not answer.
    reason : str
        Why it failed.
    renewals : int
        How often its ranks were started again, with their matrices.
    last_loss : str
        Why they were, the last time.
    """

    name: str
    state: str
    owner: str = ""
    workers: int = 0
    gpus_per_worker: float = 0.0
    env: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    named: bool = True
    detached: bool = False
    created: float = 0.0
    last_used: float = 0.0
    idle_timeout_s: float | None = None
    processes: tuple[str, ...] = ()
    calls: tuple[CallInfo, ...] = ()
    ended_calls: dict[str, dict[str, int]] = field(default_factory=dict, hash=False)
    matrices: int = 0
    nbytes: int = 0
    libraries: tuple[str, ...] = ()
    free_nbytes: int | None = None
    reason: str = ""
    renewals: int = 0
    last_loss: str = ""

    @classmethod
    def of(cls, entry: Body) -> GangInfo:
        """From what a GroupManager answers."""
        fields = {key: value for key, value in entry.items() if key in cls.__slots__}
        for key in ("env", "nodes", "processes", "libraries"):
            fields[key] = tuple(fields.get(key, ()))
        fields["calls"] = calls_of(entry)
        return cls(**fields)


def user_of(where: str) -> str:
    """The user in the text for a process: ``user@host``."""
    return PROCESS.sub("", where)


def calls_of(entry: Body) -> tuple[CallInfo, ...]:
    """The calls in what a gang reports."""
    return tuple(CallInfo(**call) for call in entry.get("calls", ()))
