"""Commands of sessions to a gateway: start, find, list and end gangs."""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import Callable
from dataclasses import asdict

from alchemist_ray.arguments import positive_int
from alchemist_ray.gang.options import AttachOptions, checked_workers, most_of
from alchemist_ray.gateway.protocol import GRACE_S
from alchemist_ray.gateway.server import own_commands
from alchemist_ray.gateway.server.access import Token, TokenFile
from alchemist_ray.gateway.server.hosted_gang import HostedGang
from alchemist_ray.gateway.server.long_waits import LongWaits
from alchemist_ray.gateway.server.quotas import Quotas
from alchemist_ray.runtime import ray_gangs
from alchemist_ray.runtime.names import PRIVATE_GANG
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

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
                gang, workers = self._resizable(token, body["gang"]), body["workers"]
                positive_int("num_workers", workers)
                with self.quotas.starting(token, workers, gang):
                    await self._waits.run(token.user, gang.resize, workers)
                return {}
            case "stop_resize":
                self._resizable(token, body["gang"]).stop_resize()
                return {}
            case "stop_gang":
                return await self._stop_gang(token, str(body["name"]))
            case "end_gang":
                gang = self._own_gang(token, body["gang"])
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
        options = own_commands.gang_options(body["options"], workers)
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
            if known.clients or not await self._forget_if_ended(token.user, known):
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
        if not token.allows("admin") and (gang is None or gang.user != token.user):
            raise Failure(
                "AuthError",
                f"gang {name} was not started by {token.user} through this gateway: stopping it "
                "needs a token with the scope 'admin'",
            )
        await self._waits.run(
            token.user, lambda: ray_gangs.stop_gang(name, address=None, token=None)
        )
        self.gangs.pop(name, None)
        return {}

    def _own_gang(self, token: Token, name: object) -> HostedGang:
        gang = self.gang_of(token, name)
        if gang.user != token.user:
            raise Failure(
                "AuthError", f"gang {name} was started by another user: use a token of that user"
            )
        return gang

    def _resizable(self, token: Token, name: object) -> HostedGang:
        gang = self.gang_of(token, name)
        if gang.user != token.user and not token.allows("admin"):
            raise Failure(
                "AuthError",
                f"gang {name} was not started by {token.user} through this gateway: resizing it "
                "needs a token with the scope 'admin'",
            )
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
