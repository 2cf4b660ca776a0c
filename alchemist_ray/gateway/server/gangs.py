"""Gangs that clients use through this gateway: their start, their end, and the limits of users."""

from __future__ import annotations

import asyncio
import contextlib
import math
import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from alchemist_ray.arguments import positive_int
from alchemist_ray.errors import AlchemistError
from alchemist_ray.gang import registry
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.options import (
    AttachOptions,
    GangOptions,
    Workers,
    checked_workers,
    most_of,
    through_gateway,
)
from alchemist_ray.gateway.protocol import DESCRIBED, GRACE_S
from alchemist_ray.gateway.server.access import Token, TokenFile
from alchemist_ray.gateway.server.transfers import GangTransfers
from alchemist_ray.runtime import ray_gangs
from alchemist_ray.runtime.cluster.actors import PRIVATE_GANG
from alchemist_ray.runtime.cluster.user_limits import check_limits
from alchemist_ray.runtime.ray_gangs import RayGangs
from alchemist_ray.version import __version__
from mpi_workers.data.description import NodeAddress
from mpi_workers.failures import Failure
from mpi_workers.matrix.sizes import readable
from mpi_workers.wire.frames import Body


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
        self.clients: set[Any] = set()  # of `gateway.Client`
        self.ended = False
        self.renewal: Body | None = None  # for clients that do not know the ranks of now

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
        """Whether the gang cannot be reached any more. Blocks."""
        try:
            self.connection.ping()
        except AlchemistError:
            return True
        return False

    def nbytes(self) -> int:
        """Bytes of its matrices. Blocks."""
        return int(self.connection.request({"op": "status"})["nbytes"])

    def described(self) -> Body:
        """The description for clients."""
        address = self.connection.address
        facts = {name: getattr(address, name) for name in DESCRIBED}
        return {**facts, "size": address.size, "lease_grace_s": GRACE_S}

    def resize(self, workers: int) -> None:
        """Move the gang to this many ranks. Blocks."""
        self._gangs.resize(self.connection, workers)
        self._most = 0  # it does not grow by itself any more
        self.connection.ping()  # it learns the addresses of the new ranks

    def stop_resize(self) -> None:
        """End a resize that is under way."""
        self._gangs.stop_resize(self.connection)

    def renewed(self, fields: Body) -> Body:
        """The gang has other ranks now; what clients are told of it."""
        self.connection.on_renewal(fields)
        address = self.connection.address
        if self.renewal is None or self.renewal["epoch"] < address.epoch:
            self.transfers.renew()
            behind = NodeAddress(0, address.size, ())
            hidden = replace(address, addresses=(), nodes=(behind,), hosts=(), node_ids=())
            self.renewal = hidden.renewal()
        return self.renewal

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
    """

    def __init__(self, of_user: int, of_all: int, full: str) -> None:
        self.of_user, self.of_all = of_user, of_all
        self._full = full
        self._counts: Counter[str] = Counter()

    def take(self, user: str) -> None:
        """One more. Raises `Failure`."""
        mine, all_users = self._counts[user], self._counts.total()
        if mine >= self.of_user or all_users >= self.of_all:
            raise Failure(
                "ResourceError",
                f"{self._full}: {mine} by {user} (limit {self.of_user}), {all_users} by all "
                f"users (limit {self.of_all}). Try again later",
            )
        self._counts[user] += 1

    def give_back(self, user: str) -> None:
        """One less."""
        self._counts -= Counter([user])


MAX_WAITS = 1024  # a thread each, as long as it waits
MAX_WAITS_OF_USER = 256

T = TypeVar("T")


class LongWaits:
    """Threads for calls that start gangs, resize them or attach to them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_WAITS, "alchemist-gateway-wait")
        full = "too many gangs are being started, resized or attached to"
        self._limit = UserLimit(MAX_WAITS_OF_USER, MAX_WAITS, full)

    async def run(self, user: str, action: Callable[..., T], *args: Any) -> T:
        """The result of an action in a thread. Raises `Failure` if too many are under way."""
        self._limit.take(user)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, action, *args)
        finally:
            self._limit.give_back(user)

    def close(self) -> None:
        """Start no more threads; those that wait end with their calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)


WHOSE = "this user's tokens"


class Quotas:
    """Checks quotas before anything is started or allocated.

    Parameters
    ----------
    gangs : mapping of str to HostedGang
        Those that are used now.
    waits : LongWaits
        Asks gangs.
    tokens : TokenFile
    """

    def __init__(
        self, gangs: Mapping[str, HostedGang], waits: LongWaits, tokens: TokenFile
    ) -> None:
        self._tokens = tokens
        self._gangs = gangs
        self._waits = waits
        self._creating: dict[str, _Creating] = {}
        self._ranks: Counter[str] = Counter()  # of gangs that are being started, by user
        self._starting: Counter[str] = Counter()

    def _of(self, token: Token) -> list[HostedGang]:
        return [gang for gang in self._gangs.values() if gang.user == token.user]

    @contextlib.contextmanager
    def starting(
        self, token: Token, workers: int, resized: HostedGang | None = None
    ) -> Iterator[None]:
        """While a gang is being started, or `resized`. Raises if it exceeds the quota."""
        mine = [gang for gang in self._of(token) if gang is not resized]
        gangs = len(mine) + self._starting[token.user] + 1
        ranks = sum(gang.ranks for gang in mine) + self._ranks[token.user] + workers
        most_gangs = self._tokens.quota(token.user, "gangs")
        most_ranks = self._tokens.quota(token.user, "ranks")
        check_limits(token.user, gangs, ranks, most_gangs, most_ranks, WHOSE)
        self._starting[token.user] += 1
        self._ranks[token.user] += workers
        try:
            yield
        finally:
            self._starting[token.user] -= 1
            self._ranks[token.user] -= workers

    async def reserve(self, token: Token, body: Body) -> Callable[[], None]:
        """Reserve the bytes of a command's new matrix, until the returned function is called.

        Call it when the gang has answered: then the gang counts them. Waits for other new
        matrices of the user if it depends on them whether this one fits. Raises `Failure` if it
        exceeds the quota.
        """
        limit = self._tokens.quota(token.user, "nbytes")
        if limit is None:
            return _nothing
        new = 0
        if body.get("op") == "create":
            new = math.prod(body["shape"]) * np.dtype(body["dtype"]).itemsize
        creating = self._creating.setdefault(token.user, _Creating())
        while True:
            answered = creating.answered
            held = sum(
                await asyncio.gather(
                    *(self._waits.run(token.user, _nbytes, gang) for gang in self._of(token))
                )
            )
            if held + new > limit or (not new and held >= limit):
                raise Failure(
                    "ResourceError",
                    f"the matrices of {token.user} have {readable(held)}, and {readable(new)} more "
                    f"would exceed the quota of {WHOSE}, {readable(limit)}: free some",
                )
            if not new:
                return _nothing
            if answered.is_set():
                continue  # a gang was perhaps asked before it had the matrix
            if held + creating.nbytes + new <= limit:
                break
            await answered.wait()
        creating.nbytes += new
        return partial(creating.end, new)


class _Creating:
    """Matrices of a user that are being created: a gang may count them, or not yet."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.answered = asyncio.Event()

    def end(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self.answered.set()
        self.answered = asyncio.Event()


def _nothing() -> None:
    """Nothing was reserved."""


def _nbytes(gang: HostedGang) -> int:
    with contextlib.suppress(AlchemistError):  # it has ended
        return gang.nbytes()
    return 0


ATTACH_TIMEOUT_S = 10.0
SUFFIX = " (gateway)"
GATEWAY = f"{platform.node()}{SUFFIX}"  # where the gangs of its clients come from


class SessionCommands:
    """The gangs that clients use through this gateway, and commands about them.

    Parameters
    ----------
    waits : LongWaits
        Runs what blocks.
    tokens : TokenFile
    """

    def __init__(self, waits: LongWaits, tokens: TokenFile) -> None:
        self._waits = waits
        self.gangs: dict[str, HostedGang] = {}
        self.quotas = Quotas(self.gangs, waits, tokens)

    def close(self) -> None:
        """Leave all gangs; those of clients end."""
        for gang in list(self.gangs.values()):
            gang.close(end=bool(gang.owner))

    async def carry_out(self, token: Token, body: Body) -> Body:
        match body.get("op"):
            case "start_gang":
                return await self._start_gang(token, body)
            case "attach_gang":
                gang = await self._attached(token, str(body["name"]), float(body["timeout_s"]))
                return gang.described()
            case "find_gang":
                return (await self.find(token, str(body["gang"]))).described()
            case "list_gangs":
                found = await self._waits.run(token.user, _listed)
                mine = {name for name, gang in self.gangs.items() if gang.user == token.user}
                shown = [g for g in found
                         if g["named"] or g["name"] in mine or token.allows("admin")]  # fmt: skip
                return {"gangs": shown}
            case "resize_gang":
                gang, workers = self._own_gang(token, body["gang"], "resizing"), body["workers"]
                positive_int("num_workers", workers)
                with self.quotas.starting(token, workers, gang):
                    await self._waits.run(token.user, gang.resize, workers)
                return {}
            case "stop_resize":
                self._own_gang(token, body["gang"], "resizing").stop_resize()
                return {}
            case "stop_gang":
                return await self._stop_gang(token, str(body["name"]))
            case "end_gang":
                gang = self._own_gang(token, body["gang"], "ending")
                self.gangs.pop(gang.name, None)
                if body.get("at_once"):
                    await self._waits.run(token.user, gang.kill, str(body.get("why", ""))[:200])
                else:
                    await self._waits.run(token.user, lambda: gang.close(end=True))
                return {}
            case op:
                raise Failure("GroupError", f"a gateway does not know the command {op!r}")

    async def _start_gang(self, token: Token, body: Body) -> Body:
        workers = checked_workers(body["workers"])
        options = gang_options(body["options"], workers)
        ident = f"{token.user}:{str(body['process'])[:64]}"
        await self._forget_ended(token.user)
        with self.quotas.starting(token, most_of(workers)):
            gangs = await self._waits.run(
                token.user,
                lambda: ray_gangs.open_gangs(
                    str(body["session"])[:32], options, f"{token.user}@{GATEWAY}"
                ),
            )
            try:
                connection = await self._waits.run(token.user, gangs.start, workers)
            except BaseException:
                _in_background(lambda: gangs.close(reusable=False))
                raise
        owner = "" if gangs.detached else ident
        most = 0 if isinstance(workers, int) else most_of(workers)
        gang = HostedGang(gangs, connection, token.user, owner, most)
        self.gangs[gang.name] = gang
        asyncio.get_running_loop().call_later(GRACE_S, self._unused, gang)
        return gang.described()

    async def _attached(self, token: Token, name: str, timeout_s: float) -> HostedGang:
        if name in self.gangs:
            known = self.gang_of(token, name)
            if not await self._forget_if_ended(token.user, known):
                return known
        gangs, connection = await self._waits.run(
            token.user,
            ray_gangs.attach,
            AttachOptions(name, timeout_s=min(timeout_s, 600.0), progress=False, output=False),
        )
        found = self.gangs.get(name)
        if found is not None:  # another client was faster
            _in_background(lambda: HostedGang(gangs, connection, "", "").close(end=False))
            return found
        user = await self._waits.run(token.user, _starter_of, name)
        gang = self.gangs.setdefault(name, HostedGang(gangs, connection, user, ""))
        asyncio.get_running_loop().call_later(GRACE_S, self._unused, gang)
        return gang

    async def find(self, token: Token, name: str) -> HostedGang:
        """A gang by its id, also after this gateway was started again. Raises as `gang_of`."""
        if name not in self.gangs and not PRIVATE_GANG.fullmatch(name):
            return await self._attached(token, name, ATTACH_TIMEOUT_S)
        return self.gang_of(token, name)

    async def _forget_ended(self, user: str) -> None:
        """Detached gangs count for their user's quotas until they have ended."""
        for gang in list(self.gangs.values()):
            if gang.user == user and not gang.clients:
                await self._forget_if_ended(user, gang)

    async def _forget_if_ended(self, user: str, gang: HostedGang) -> bool:
        """Whether a gang has ended: then another one may have its name.

        A gang whose connection is there is not asked: one that hangs would hold up its users.
        """
        if gang.connection.known_loss() is None or not await self._waits.run(user, gang.has_ended):
            return False
        if self.gangs.get(gang.name) is gang:
            del self.gangs[gang.name]
        await self._waits.run(user, lambda: gang.close(end=False))
        return True

    def _unused(self, gang: HostedGang) -> None:
        """A client that has asked for a gang did not attach to it."""
        if not gang.clients:
            self.release(gang)

    async def _stop_gang(self, token: Token, name: str) -> Body:
        gang = self.gangs.get(name)
        _check_own(token, name, gang, "stopping")
        await self._waits.run(
            token.user, lambda: ray_gangs.stop_gang(name, address=None, token=None)
        )
        self.gangs.pop(name, None)
        return {}

    def _own_gang(self, token: Token, name: object, doing: str) -> HostedGang:
        gang = self.gang_of(token, name)
        _check_own(token, name, gang, doing)
        return gang

    def release(self, gang: HostedGang) -> None:
        """Leave a gang that no client uses; end it if it belonged to one."""
        if self.gangs.get(gang.name) is gang and not gang.stays:
            del self.gangs[gang.name]
            _in_background(lambda: gang.close(end=bool(gang.owner)))

    def gang_of(self, token: Token, name: object) -> HostedGang:
        """A gang that a user may attach to. Raises `Failure`."""
        gang = self.gangs.get(str(name))
        if gang is None:
            raise Failure(
                "GroupFailedError",
                f"gang {name} is not open at this gateway: it has ended, or was never attached "
                "here. AlchemistSession.list() shows the gangs",
            )
        if not gang.connection.address.shared and gang.user != token.user:
            raise Failure(
                "AuthError",
                f"gang {name} is private to another user: others can attach to gangs that were "
                "started with a name",
            )
        return gang


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


def _check_own(token: Token, name: object, gang: HostedGang | None, doing: str) -> None:
    if not token.allows("admin") and (gang is None or gang.user != token.user):
        raise Failure(
            "AuthError",
            f"gang {name} was not started by {token.user} through this gateway: {doing} it needs "
            "a token with the scope 'admin'",
        )


def _in_background(action: Callable[[], object]) -> None:
    threading.Thread(target=action, name="alchemist-gateway-end", daemon=True).start()


def _starter_of(name: str) -> str:
    """Who has started a named gang through a gateway, perhaps another one; else empty."""
    for found in ray_gangs.list_gangs(address=None, token=None):
        if found.name == name and found.owner.endswith(SUFFIX):
            return found.owner.rpartition("@")[0]
    return ""


def _listed() -> list[Body]:
    return [asdict(gang) for gang in ray_gangs.list_gangs(address=None, token=None)]
