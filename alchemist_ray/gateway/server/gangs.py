"""Gangs that clients use through this gateway: their start, their end, and the limits of users."""

from __future__ import annotations

import contextlib
import math
import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from alchemist_ray.arguments import positive_int
from alchemist_ray.attached import registry
from alchemist_ray.attached.connection import GangConnection, channel_between
from alchemist_ray.attached.options import (
    AttachOptions,
    GangOptions,
    Workers,
    checked_workers,
    most_of,
    through_gateway,
)
from alchemist_ray.cluster.actors import PRIVATE_GANG
from alchemist_ray.cluster.user_limits import check_limits
from alchemist_ray.errors import AlchemistError, failure_of
from alchemist_ray.gateway.protocol import DESCRIBED, RESUME_S
from alchemist_ray.gateway.server.access import READ_ONLY, Token, TokenFile, may_change, require
from alchemist_ray.gateway.server.transfers import GangTransfers
from alchemist_ray.launchers.mpmd import HydraLauncher
from alchemist_ray.ray_access import ray_gangs
from alchemist_ray.ray_access.ray_gangs import RayGangs
from alchemist_ray.transfer.gang_copies import copy_matrix
from alchemist_ray.version import __version__
from mpi_workers.data.description import NodeAddress, TransferTarget
from mpi_workers.failures import Failure
from mpi_workers.matrix.dtypes import stored_dtype
from mpi_workers.matrix.layout import Distribution, stored_shape
from mpi_workers.matrix.sizes import readable
from mpi_workers.wire.frames import Body


class HostedClient(Protocol):
    """A process that is attached to a gang: `gateway.Client`."""

    ident: str
    user: str

    def drop(self) -> None:
        """End its connections."""


class HostedGang:
    """The gateway's own connection to a gang, and what it knows of its use.

    Parameters
    ----------
    gangs : RayGangs
        Has started the gang, or is attached to it.
    connection : GangConnection
    user : str
        Who has started it; empty for a gang that was not started here.
    owner : str
        The client process with which it ends; empty if it stays.
    most : int
        Ranks to which it may grow by itself; 0 if it does not.
    """

    def __init__(
        self, gangs: RayGangs, connection: GangConnection, user: str, owner: str, most: int = 0
    ) -> None:
        self._gangs = gangs
        self.connection = connection
        self.user = user
        self.owner = owner
        self._most = most
        self.transfers = GangTransfers(connection)
        self.clients: dict[str, HostedClient] = {}  # by process, also when they are lost
        self.ended = False
        self.move: Body | None = None  # for clients that do not know the ranks of now

    @property
    def name(self) -> str:
        return self.connection.address.gang

    @property
    def stays(self) -> bool:
        """Whether it was started here and outlives its clients: it counts for its user's quotas."""
        return bool(self.user) and not self.owner

    @property
    def ranks(self) -> int:
        """Ranks that count for its user's quota: those that it has, or to which it may grow."""
        return max(self._most, self.connection.address.size)

    def has_ended(self) -> bool:
        """Whether the gang cannot be reached any more. Blocks.

        A gang whose connection is there is not asked: one that hangs would hold up its users.
        """
        if self.connection.known_loss() is None:
            return False
        with contextlib.suppress(AlchemistError):
            self.connection.ping()
            return False
        return True

    def nbytes(self) -> int:
        """Bytes of its matrices, 0 if it has ended. Blocks."""
        with contextlib.suppress(AlchemistError):
            return int(self.connection.request({"op": "status"})["nbytes"])
        return 0

    def described(self) -> Body:
        """The description for clients."""
        address = self.connection.address
        facts = {name: getattr(address, name) for name in DESCRIBED}
        return {**facts, "size": address.size, "lease_grace_s": RESUME_S}

    def resize(self, workers: int) -> None:
        """Move the gang to this many ranks. Blocks."""
        self._gangs.resize(self.connection, workers)
        self._most = 0  # it does not grow by itself any more
        self.connection.ping()  # it learns the addresses of the new ranks

    def stop_resize(self) -> None:
        """End a resize that is under way."""
        self._gangs.stop_resize(self.connection)

    def moved(self, fields: Body) -> Body:
        """The gang has other ranks now; what clients are told of it."""
        self.connection.on_move(fields)
        address = self.connection.address
        if self.move is None or self.move["epoch"] < address.epoch:
            self.transfers.reopen()
            behind = NodeAddress(0, address.size, ())
            hidden = replace(address, addresses=(), nodes=(behind,), hosts=(), node_ids=())
            self.move = hidden.move()
        return self.move

    def kill(self, why: str) -> None:
        """End the gang at once. Blocks."""
        self._gangs.kill(why)
        self.close(end=True)

    def close(self, *, end: bool) -> None:
        """Leave the gang, or end it. Blocks; a second call does nothing."""
        if self.ended:
            return
        self.ended = True
        self.transfers.close()
        if end:
            fit = self._gangs.end(running=True)
            registry.detach(self.connection)
            self._gangs.close(reusable=fit)
        else:
            registry.leave(self.connection)


class UserLimit:
    """How many of something one user, and all together, may have at a time.

    Parameters
    ----------
    of_user, of_all : int
    full : str
        Begins the message when there are too many.

    Attributes
    ----------
    counts : Counter
        How many each user has now.
    """

    def __init__(self, of_user: int, of_all: int, full: str) -> None:
        self.of_user, self.of_all = of_user, of_all
        self._full = full
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one_of(self, user: str) -> Iterator[None]:
        """While there is one more. Raises `Failure`."""
        with self._lock:
            mine, all_users = self.counts[user], self.counts.total()
            if mine >= self.of_user or all_users >= self.of_all:
                raise Failure(
                    "ResourceError",
                    f"{self._full}: {mine} by {user} (limit {self.of_user}), {all_users} by all "
                    f"users (limit {self.of_all}). Try again later",
                )
            self.counts[user] += 1
        try:
            yield
        finally:
            with self._lock:
                self.counts -= Counter([user])


WHOSE = "this user's tokens"
CREATED_POLL_S = 10.0  # until a matrix that is being created is looked for again


class Quotas:
    """Checks quotas before anything is started or allocated.

    Parameters
    ----------
    gangs : mapping of str to HostedGang
        Those that are used now.
    tokens : TokenFile
    """

    def __init__(self, gangs: Mapping[str, HostedGang], tokens: TokenFile) -> None:
        self._tokens = tokens
        self._gangs = gangs
        self._changed = threading.Condition()  # guards what follows, by user
        self._starting: list[tuple[str, int]] = []  # user and ranks of gangs that are being started
        # User and bytes of matrices that are being created: a gang may count them already, or not.
        self._creating: dict[object, tuple[str, int]] = {}
        self._created: Counter[str] = Counter()  # answers

    def _of(self, token: Token) -> list[HostedGang]:
        return [gang for gang in list(self._gangs.values()) if gang.user == token.user]

    @contextlib.contextmanager
    def starting(
        self, token: Token, workers: int, resized: HostedGang | None = None
    ) -> Iterator[None]:
        """While a gang is being started, or `resized`. Raises if it exceeds the quota."""
        most_gangs = self._tokens.quota(token.user, "gangs")
        most_ranks = self._tokens.quota(token.user, "ranks")
        with self._changed:
            mine = [gang for gang in self._of(token) if gang is not resized]
            ranks = [gang.ranks for gang in mine]
            ranks += [its for user, its in self._starting if user == token.user]
            total = sum(ranks) + workers
            check_limits(token.user, len(ranks) + 1, total, most_gangs, most_ranks, WHOSE)
            self._starting.append((token.user, workers))
        try:
            yield
        finally:
            with self._changed:
                self._starting.remove((token.user, workers))

    def reserve(self, token: Token, gang: HostedGang, body: Body) -> Callable[[], None]:
        """Reserve the bytes of a command's new matrix, until the returned function is called.

        Call it when the gang has answered: then the gang counts them. Waits for other new
        matrices of the user if it depends on them whether this one fits. Raises `Failure` if it
        exceeds the quota. The results of other commands are known to the gang only: it refuses
        those that exceed the ``quota_nbytes`` that the command gets here.
        """
        limit = self._tokens.quota(token.user, "nbytes")
        if limit is None:
            return _nothing
        if body["op"] != "create":
            others = sum(one.nbytes() for one in self._of(token) if one is not gang)
            extra = gang.nbytes() if gang.user != token.user else 0
            body["quota_nbytes"] = limit - others + extra
            return _nothing
        new = math.prod(body["shape"]) * np.dtype(body["dtype"]).itemsize
        while True:
            created = self._created[token.user]
            held = sum(gang.nbytes() for gang in self._of(token))
            if held + new > limit:
                raise Failure(
                    "ResourceError",
                    f"the matrices of {token.user} have {readable(held)}, and {readable(new)} more "
                    f"would exceed the quota of {WHOSE}, {readable(limit)}: free some",
                )
            with self._changed:
                if self._created[token.user] != created:
                    continue  # a gang was perhaps asked before it had the matrix
                others = sum(its for user, its in self._creating.values() if user == token.user)
                if held + others + new <= limit:
                    reservation = object()
                    self._creating[reservation] = token.user, new
                    return partial(self._answered, reservation)
                self._changed.wait(CREATED_POLL_S)

    def _answered(self, reservation: object) -> None:
        with self._changed:
            user, _ = self._creating.pop(reservation, ("", 0))
            self._created[user] += 1
            self._changed.notify_all()


def _nothing() -> None:
    """Nothing was reserved."""


JOIN_TIMEOUT_S = 10.0
SUFFIX = " (gateway)"
GATEWAY = f"{platform.node()}{SUFFIX}"  # where the gangs of its clients come from


class SessionCommands:
    """The gangs that clients use through this gateway, and commands about them.

    Parameters
    ----------
    tokens : TokenFile
    """

    def __init__(self, tokens: TokenFile) -> None:
        self.gangs: dict[str, HostedGang] = {}
        self.quotas = Quotas(self.gangs, tokens)
        self._tokens = tokens
        self._lock = threading.RLock()  # guards the gangs and their clients

    def clients(self) -> list[HostedClient]:
        """Clients that are attached, or may come back."""
        with self._lock:
            return [client for gang in self.gangs.values() for client in gang.clients.values()]

    def close(self) -> None:
        """Leave all gangs; those of clients end."""
        for gang in list(self.gangs.values()):
            gang.close(end=bool(gang.owner))

    def carry_out(self, token: Token, body: Body) -> Body:
        """The result of a command about gangs. Blocks. Raises `Failure`, `AlchemistError`."""
        match body.get("op"):
            case "start_gang":
                return self._start_gang(token, body)
            case "attach_gang":
                timeout_s = float(body["timeout_s"])
                return self._attached(token, str(body["name"]), timeout_s).described()
            case "find_gang":
                return self.find(token, str(body["gang"])).described()
            case "list_gangs":
                mine = {gang.name for gang in list(self.gangs.values()) if gang.user == token.user}
                shown = [
                    gang for gang in _listed()
                    if gang["named"] or gang["name"] in mine or token.allows("admin")
                ]  # fmt: skip
                for entry in shown:
                    hosted = self.gangs.get(entry["name"])
                    user = "" if hosted is None else hosted.user
                    if not may_change(token, user, self._tokens):
                        entry |= {"calls": [], "ended_calls": {}}
                return {"gangs": shown}
            case "resize_gang":
                gang = self._own_gang(token, body["gang"], "resizing")
                workers = body["workers"]
                positive_int("num_workers", workers)
                with self.quotas.starting(token, workers, gang):
                    gang.resize(workers)
                return {}
            case "stop_resize":
                self._own_gang(token, body["gang"], "resizing").stop_resize()
                return {}
            case "stop_gang":
                return self._stop_gang(token, str(body["name"]))
            case "copy_matrix":
                return self._copy_matrix(token, body)
            case "end_gang":
                gang = self._own_gang(token, body["gang"], "ending")
                self.gangs.pop(gang.name, None)
                if body.get("at_once"):
                    gang.kill(str(body.get("why", ""))[:200])
                else:
                    gang.close(end=True)
                return {}
            case op:
                raise Failure("GroupError", f"a gateway does not know the command {op!r}")

    def _start_gang(self, token: Token, body: Body) -> Body:
        workers = checked_workers(body["workers"])
        options = gang_options(body["options"], workers)
        if options.launcher == HydraLauncher.name:
            require(
                token, "admin", "Hydra's control ports have no authentication: launcher='hydra'"
            )
        if options.env:
            require(token, "run_code", "env= can name a file of code that a library loads")
        ident = f"{token.user}:{str(body['process'])[:64]}"
        self._forget_ended(token.user)
        with self.quotas.starting(token, most_of(workers)):
            gangs = ray_gangs.open_gangs(
                str(body["session"])[:32], options, f"{token.user}@{GATEWAY}"
            )
            try:
                connection = gangs.start(workers)
            except BaseException:
                later(0.0, partial(gangs.close, reusable=False))
                raise
            owner = "" if gangs.detached else ident
            most = 0 if isinstance(workers, int) else most_of(workers)
            gang = HostedGang(gangs, connection, token.user, owner, most)
            self.gangs[gang.name] = gang
        later(RESUME_S, self._release_unused, gang)
        return gang.described()

    def _attached(self, token: Token, name: str, timeout_s: float) -> HostedGang:
        if name in self.gangs:
            known = self.gang_of(token, name)
            if not self._forget_if_ended(known):
                return known
        gangs, connection = ray_gangs.attach(
            AttachOptions(name, timeout_s=min(timeout_s, 600.0), progress=False, output=False)
        )
        gang = HostedGang(gangs, connection, _starter_of(name), "")
        found = self.gangs.setdefault(name, gang)
        if found is gang:
            later(RESUME_S, self._release_unused, gang)
        else:  # another client was faster
            gang.close(end=False)
        return found

    def find(self, token: Token, name: str) -> HostedGang:
        """A gang by its id, also after this gateway was started again. Raises as `gang_of`."""
        if name not in self.gangs and not PRIVATE_GANG.fullmatch(name):
            return self._attached(token, name, JOIN_TIMEOUT_S)
        return self.gang_of(token, name)

    def _forget_ended(self, user: str) -> None:
        """Detached gangs count for their user's quotas until they have ended."""
        for gang in list(self.gangs.values()):
            if gang.user == user and not gang.clients:
                self._forget_if_ended(gang)

    def _forget_if_ended(self, gang: HostedGang) -> bool:
        """Whether a gang has ended: then another one may have its name."""
        if not gang.has_ended():
            return False
        with self._lock:
            if self.gangs.get(gang.name) is gang:
                del self.gangs[gang.name]
        gang.close(end=bool(gang.owner))
        return True

    def joined(self, gang: HostedGang, client: HostedClient) -> HostedClient | None:
        """A process has attached; its last connection, if it had one. Raises `Failure`."""
        with self._lock:
            if self.gangs.get(gang.name) is not gang:
                raise Failure("GroupFailedError", f"gang {gang.name} has just ended")
            before = gang.clients.get(client.ident)
            gang.clients[client.ident] = client
            return before

    def disconnected(self, gang: HostedGang, client: HostedClient) -> bool:
        """A process has left; False if it has connected again meanwhile."""
        with self._lock:
            if gang.clients.get(client.ident) is not client:
                return False
            del gang.clients[client.ident]
            if not gang.clients or gang.owner == client.ident:
                self._release(gang)
            return True

    def _release_unused(self, gang: HostedGang) -> None:
        """A client that has asked for a gang did perhaps not attach to it."""
        with self._lock:
            if not gang.clients:
                self._release(gang)

    def _release(self, gang: HostedGang) -> None:
        """Leave a gang that no client uses; end it if it belonged to one."""
        if self.gangs.get(gang.name) is gang and not gang.stays:
            del self.gangs[gang.name]
            later(0.0, partial(gang.close, end=bool(gang.owner)))

    def _stop_gang(self, token: Token, name: str) -> Body:
        gang = self.gangs.get(name)  # none after the gateway was started again
        _check_own(token, name, _starter_of(name) if gang is None else gang.user, "stopping")
        ray_gangs.stop_gang(name, address=None, token=None)
        if (gang := self.gangs.pop(name, None)) is not None:
            gang.close(end=bool(gang.owner))  # its GroupManager, and with it the name
        return {}

    def _copy_matrix(self, token: Token, body: Body) -> Body:
        """Copy a matrix of one gang into one of another; the token must have rights for both."""
        gangs = [self.gang_of(token, body[key]) for key in ("source", "gang")]
        if not may_change(token, gangs[1].user, self._tokens):
            raise Failure("AuthError", READ_ONLY)
        source, target = (gang.connection for gang in gangs)
        read, written = (
            _checked_matrix(gang.connection, int(matrix), str(dtype))
            for gang, (matrix, dtype) in zip(gangs, body["matrices"], strict=True)
        )
        times = copy_matrix(source, read, target, written, str(body["name"])[:200])
        return {"times": [list(astuple(each)) for each in times.values()]}

    def couple(self, token: Token, gang: HostedGang, body: Body) -> None:
        """Add to a call how its ranks reach the gangs that it names. Raises `Failure`."""
        call = body["command"] if isinstance(body.get("command"), dict) else body
        try:
            named = [
                (str(name), self.gang_of(token, about["other"]), int(about["fields"]))
                for name, about in call.get("channels", {}).items()
            ]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise failure_of(error, "channel") from None
        for name, other, fields in named:
            if not may_change(token, other.user, self._tokens):
                raise Failure("AuthError", READ_ONLY)
            about = channel_between(gang.connection, other.connection, name, fields)
            call["channels"][name] = about

    def _own_gang(self, token: Token, name: object, doing: str) -> HostedGang:
        gang = self.gang_of(token, name)
        _check_own(token, name, gang.user, doing)
        return gang

    def gang_of(self, token: Token, name: object) -> HostedGang:
        """A gang that a user may attach to. Raises `Failure`."""
        gang = self.gangs.get(str(name))
        if gang is None:
            why = (
                "it has ended, or was never attached here. AlchemistSession.list() shows the gangs"
            )
            if PRIVATE_GANG.fullmatch(str(name)):
                why = (
                    "it has ended. Gangs without a name end with their gateway too, and that may "
                    "have been started again: make another session"
                )
            raise Failure("GroupFailedError", f"gang {name} is not open at this gateway: {why}")
        if not gang.connection.address.shared and gang.user != token.user:
            raise Failure(
                "AuthError",
                f"gang {name} is private to another user: others can attach to gangs that were "
                "started with a name",
            )
        return gang


def _checked_matrix(connection: GangConnection, matrix: int, dtype: str) -> TransferTarget:
    """A matrix as its gang describes it, seen as of a dtype (dates are counts there)."""
    about = connection.request({"op": "describe", "matrix": matrix})
    distribution = Distribution(
        about["layout"], stored_shape(tuple(about["shape"])), connection.grid
    )
    seen = np.dtype(dtype)
    if stored_dtype(seen) != np.dtype(about["dtype"]):
        raise Failure("DtypeError", f"matrix {matrix} has dtype {about['dtype']}, not {seen}")
    return TransferTarget(matrix, distribution, seen)


def gang_options(given: object, workers: Workers) -> GangOptions:
    """The options of a gang as a client sent them. Raises `Failure`, `ValueError`."""
    known = set(through_gateway())
    if not isinstance(given, dict) or given.keys() != known:
        different = sorted(known ^ given.keys()) if isinstance(given, dict) else ["all"]
        raise Failure(
            "BadArgumentError",
            f"the client and this gateway differ in the options of a gang ({', '.join(different)}):"
            f" install version {__version__} of alchemist-client",
        )
    return GangOptions(workers, progress=False, output=False, **given)


def _check_own(token: Token, name: object, user: str, doing: str) -> None:
    if not token.allows("admin") and user != token.user:
        raise Failure(
            "AuthError",
            f"gang {name} was not started by {token.user} through a gateway: {doing} it needs "
            "a token with the scope 'admin'",
        )


def later(seconds: float, action: Callable[..., object], *args: Any) -> None:
    """Do something in a thread of its own, after some time."""
    timer = threading.Timer(seconds, action, args)
    timer.daemon = True
    timer.start()


def _starter_of(name: str) -> str:
    """The user who started a named gang through any gateway; else empty."""
    for found in ray_gangs.list_gangs(address=None, token=None):
        if found.name == name and found.owner.endswith(SUFFIX):
            return found.owner.rpartition("@")[0]
    return ""


def _listed() -> list[Body]:
    return [asdict(gang) for gang in ray_gangs.list_gangs(address=None, token=None)]
