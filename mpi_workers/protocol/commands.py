"""The commands of a gang. Each is declared here, and nowhere else.

A process sends a command to the gang's dispatcher, which carries it out itself or sends it on to
the ranks. From `COMMANDS` follow what the dispatcher accepts and when it runs it, what a gateway
passes on, what a connection sends again after it was lost, what is run again after the loss of
ranks, and what ranks accept. The handlers are the methods of the same name: of `Dispatcher`,
`Commands` and `CallStore` in `alchemist_ray.runtime`, of `RankCommands` in
`mpi_workers.rank.commands`. From
`Nodes.round` (`alchemist_ray.runtime.commands.nodes`) a command passes `Proxy._command` and
`CommandRelay.relay` (`mpi_workers.node`) on its way to `RankLoop.run` (`mpi_workers.rank.process`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from mpi_workers.deadlines import MOST_STUCK_S
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body


class Turn(Enum):
    """When the dispatcher carries out a command."""

    QUEUED = "one at a time, in turn with those of other processes"
    AT_ONCE = "when it arrives, also while another command runs"
    CONNECTION = "when it arrives; it is about the connection that sends it"
    STORE = "when it arrives; it is about calls that outlive the process that submits them"


class Rerun(Enum):
    """Whether a command that was lost with ranks is run again on the next ones."""

    ALWAYS = "it has no other effect than its results"
    IF_PURE = "if it is declared pure"
    NEVER = "what it needs is lost"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a gang.

    Attributes
    ----------
    fields : str
        What its sender gives; ``?``: optional. Each command may also have ``id`` (the sender waits
        for an answer), ``timeout_s`` (seconds, with the time in the queue; of a ``run`` with
        ``own_turn`` without it), ``stuck_timeout_s`` (for which ranks may be in it when it is over)
        and ``output`` (whether the sender shows what ranks print). A gateway adds ``quota_nbytes``
        to those that make matrices: bytes that all matrices of the gang may have.
    turn : Turn
    scope : str or None
        The scope of a token with which a gateway passes it on, empty: any token. None: a gateway
        does not pass it on. More is decided by `gateway.server.access`.
    internal : bool
        No process may send it: the GroupManager itself runs it.
    audited : bool
        A gateway writes it to its log.
    rerun : Rerun
    ranks : str or None
        What the ranks get. Each such command also has ``op`` and ``seq``, and may have
        ``unreferenced`` and ``discard``: ids of matrices to free first, one by one, and from an id
        on; ``call`` and ``run`` also ``channels``, how to reach the gangs that theirs is coupled
        with, by channel, ``room``, bytes that their results may have, and ``changes``,
        ids of the matrices that they may change (default: all that they get). None: ranks take no
        part.
    collective : bool
        The ranks may meet in MPI: if it fails on one, the others leave their waits, and the next
        such command gets other communicators.
    makes : bool
        It makes matrices, for which a user may have a quota.
    sees_arrays : bool
        It may read, change or list matrices: changes that a process has recorded are made first.
    prints : bool
        Its code on the ranks may print.
    notice : str
        What its sender is told if it takes long, with the names of fields in braces; empty:
        nothing, it takes as long as the user's own code does.
    """

    fields: str = ""
    turn: Turn = Turn.QUEUED
    scope: str | None = None
    internal: bool = False
    audited: bool = False
    rerun: Rerun = Rerun.ALWAYS
    ranks: str | None = None
    collective: bool = False
    makes: bool = False
    sees_arrays: bool = True
    prints: bool = False
    notice: str = ""

    @property
    def required(self) -> list[str]:
        """The fields that a sender must give."""
        return [name for name in self.fields.split() if not name.endswith("?")]

    @property
    def idempotent(self) -> bool:
        """Whether a process sends it again when its connection was lost before the answer.

        It only reads or states what is so, or it has the token of a send: the gang knows that one.
        """
        return self.turn is not Turn.QUEUED or "send" in self.required


def _queued(fields: str, ranks: str, scope: str | None = "", **more: object) -> Command:
    return Command(fields, scope=scope, ranks=ranks, **more)  # type: ignore[arg-type]


def _at_once(fields: str, scope: str | None = "", **more: object) -> Command:
    return Command(fields, Turn.AT_ONCE, scope, **more)  # type: ignore[arg-type]


def _connection(fields: str, scope: str | None = "", **more: object) -> Command:
    return Command(fields, Turn.CONNECTION, scope, **more)  # type: ignore[arg-type]


def _store(fields: str, **more: object) -> Command:
    return Command(fields, Turn.STORE, "", sees_arrays=False, **more)  # type: ignore[arg-type]


_CODE = "run_code"
CALL_LIMITS_S = {"timeout_s": math.inf, "stuck_timeout_s": MOST_STUCK_S}  # and their largest values

COMMANDS: dict[str, Command] = {
    # Matrices. `send`: a token of the sender for one matrix that it sends.
    "create": _queued(
        "send shape dtype layout becomes? source? columns?", "matrix layout shape dtype",
        audited=True, makes=True,
    ),
    "seal": _queued("send matrix name?", "matrix", rerun=Rerun.NEVER),
    "free": _queued("matrices", "", audited=True),
    "redistribute": _queued(
        "source layout name?", "source matrix layout", collective=True, makes=True
    ),
    # Code.
    "load": _queued(
        "library path? reload?", "library", audited=True, collective=True, prints=True,
        sees_arrays=False,
        notice="the ranks still load library {library!r}",
    ),
    "call": _queued(
        "library routine arguments columns? channels?", "library routine arguments first",
        audited=True, collective=True, makes=True, prints=True, rerun=Rerun.IF_PURE,
    ),
    "run": _queued(
        "task uses pure? own_turn? channels?", "name first", _CODE,
        audited=True, collective=True, makes=True, prints=True, rerun=Rerun.IF_PURE,
    ),
    "keep_result": _queued("", "matrix layout shape dtype", None, internal=True),
    "adopt": _queued("", "matrices", None, internal=True),
    "resize": Command("matrices", scope=None, internal=True, rerun=Rerun.NEVER),
    "keep_copies": Command(scope=None, internal=True, rerun=Rerun.NEVER),
    "checkpoint": Command("path cut?", scope="files", audited=True, rerun=Rerun.NEVER),
    # Leases, and what the gang holds.
    "release": _at_once("matrices"),
    "hold": _at_once("matrices"),
    "pin": _at_once("matrices"),
    "resume": _at_once("matrices"),
    "describe": _at_once("matrix name? pin? source? columns?"),
    "list_matrices": _at_once("names?"),
    "list_libraries": _at_once(""),
    "sources": _at_once("matrices"),
    "ping": _at_once("wait? workers?", sees_arrays=False),
    "file_stamp": _at_once("matrix stamp", None),
    # The connection and the calls of its process.
    "session": _connection(""),
    "goodbye": _connection(""),
    "cancel": _connection("call"),
    "cancel_calls": _connection("all?", audited=True, sees_arrays=False),
    "status": _connection("", sees_arrays=False),
    "version": _connection("matrix", sees_arrays=False),
    # Submitted calls. `call`: the id of one, from the process that submits it; `command`: a `call`
    # or `run`; `since`: a number of the store's, whose next change is waited for.
    "submit": Command("call command keep_s", Turn.STORE, "", audited=True, makes=True),
    "submitted": _store("running?"),
    "call_state": _store("call"),
    "call_result": _store("call"),
    "cancel_call": _store("call", audited=True),
    "forget_call": _store("call"),
}  # fmt: skip


def checked(body: Body) -> Command:
    """The command that a body asks for.

    Raises
    ------
    Failure
        If it is unknown or lacks fields, or no process may send it.
    """
    op = body.get("op")
    command = COMMANDS.get(op) if isinstance(op, str) else None
    if command is None or command.internal:
        raise Failure("GroupError", f"unknown command {op!r}")
    if missing := [name for name in command.required if name not in body]:
        raise Failure("GroupError", f"malformed command {op!r}: it needs {', '.join(missing)}")
    for name, most in CALL_LIMITS_S.items():
        limit_s = body.get(name)
        if limit_s is not None and not (isinstance(limit_s, int | float) and 0 < limit_s <= most):
            words = f"{name}={limit_s!r}: it must be greater than 0, and at most {most:g}"
            raise Failure("BadArgumentError", words)
    return command


def matrices_of(body: Body) -> list[int]:
    """Ids of the matrices that a command takes."""
    match body:
        case {"op": "call", "arguments": arguments}:
            return [value["matrix"] for value in arguments.values() if isinstance(value, dict)]
        case {"op": "run", "uses": uses}:
            return list(uses)
        case {"op": "redistribute", "source": source}:
            return [source]
    return []


def command_name(body: Body) -> str:
    """A command as users know it: ``linalg.svd``, a function's name, or the operation."""
    match body:
        case {"op": "call", "library": library, "routine": routine}:
            return f"{library}.{routine}"
        case {"op": "run", "task": {"name": name}} | {"op": "run", "name": name}:
            return str(name)
        case {"op": "load", "library": library}:
            return f"load_library({library!r})"
    return str(body.get("op"))
