"""The processes that are attached to a gang, and how long they keep their leases when lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mpi_workers.wire.frames import Body


@dataclass(slots=True, eq=False)
class AttachedProcess:
    """A process that is attached to the gang; its id holds the leases of its matrices.

    Attributes
    ----------
    ident : str
        It reconnects with the same one.
    owner : bool
        Whether the gang ends with it.
    session : bool
        Whether it has a session on the gang; else it has only handles, as a Ray task has.
    where : str
        ``user@host (pid 123)``.
    grace_s : float
        How long it may be lost, and come back.
    connections : int
        0 while it is lost.
    """

    ident: str
    owner: bool
    session: bool
    where: str
    grace_s: float
    connections: int = 0
    timer: asyncio.TimerHandle | None = None


class AttachedProcesses:
    """The attached processes of one gang.

    Parameters
    ----------
    grace_s : float
        How long a lost process keeps its leases.
    on_gone : callable(ident)
        Called when the leases of a process end.
    """

    def __init__(self, grace_s: float, on_gone: Callable[[str], None]) -> None:
        self._grace_s = grace_s
        self._on_gone = on_gone
        self._processes: dict[str, AttachedProcess] = {}

    def joined(self, hello: Body) -> AttachedProcess:
        """A connection has been opened; of a process that was lost, its leases stay."""
        ident = str(hello["process"])
        process = self._processes.get(ident)
        if process is None:
            process = self._processes[ident] = AttachedProcess(
                ident,
                owner=hello.get("owner") is True,
                session=hello.get("session") is True,
                where=str(hello.get("where", "")),
                grace_s=max(self._grace_s, float(hello.get("grace_s", 0.0))),
            )
        if process.timer is not None:
            process.timer.cancel()
            process.timer = None
        process.connections += 1
        return process

    def disconnected(self, process: AttachedProcess) -> None:
        """A connection is gone. Its process may come back within the grace."""
        process.connections -= 1
        if process.connections:
            return
        if process.grace_s and self._processes.get(process.ident) is process:
            loop = asyncio.get_running_loop()
            process.timer = loop.call_later(process.grace_s, self.ended, process)
        else:
            self.ended(process)

    def ended(self, process: AttachedProcess) -> None:
        """A process has detached, or did not come back in time."""
        if self._processes.get(process.ident) is process:
            del self._processes[process.ident]
            self._on_gone(process.ident)

    def connected(self) -> list[AttachedProcess]:
        """Those that have a session and are connected now."""
        return [p for p in self._processes.values() if p.connections and p.session]

    def users(self, idents: Iterable[str]) -> list[str]:
        """Descriptions of the processes with a session that have these ids."""
        wanted = set(idents)
        return [process.where for process in self.connected() if process.ident in wanted]
