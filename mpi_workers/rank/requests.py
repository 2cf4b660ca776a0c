"""GangRequest: an MPI request whose waits can be interrupted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from mpi4py import MPI

from mpi_workers.rank.waits import until

T = TypeVar("T")
ABANDONED_LIMIT = 64  # abandoned requests: then the finished ones are released

_abandoned: deque[GangRequest] = deque()  # MPI may still write into their buffers
_limit = ABANDONED_LIMIT


def wait(request: MPI.Request, status: MPI.Status | None = None) -> None:
    """Wait for a request. Raises `Interrupted` if the call ends first."""
    until(lambda: request.Test(status))


def release_finished() -> None:
    """Release the buffers of abandoned operations that have finished since."""
    global _limit
    for _ in range(len(_abandoned)):  # other threads may append meanwhile
        request = _abandoned.popleft()
        if not request.Test():
            _abandoned.append(request)
    _limit = max(ABANDONED_LIMIT, 2 * len(_abandoned))


def abandoned() -> int:
    """How many operations are under way whose requests were dropped."""
    return len(_abandoned)


def _outcome(test: Callable[[], tuple[bool, T]]) -> T:
    """The value of a test of requests once they are done. Raises `Interrupted`."""
    found: list[T] = []

    def done() -> bool:
        is_done, value = test()
        if is_done:
            found.append(value)
        return is_done

    until(done)
    return found[0]


class GangRequest(MPI.Request):
    """An `mpi4py.MPI.Request` with waits that can be interrupted.

    An operation that is under way when its request is dropped keeps its buffers, so a call may be
    interrupted while other ranks still write into this rank's memory.
    """

    _buffers: Any  # mpi4py 4.1 releases those of Iallgatherv and of all reductions too early

    @classmethod
    def of(cls, request: MPI.Request, *buffers: Any) -> GangRequest:
        """The request, and the buffers that its operation reads and writes."""
        if len(_abandoned) >= _limit:  # not in __del__, which any thread may run
            release_finished()
        own = cls(request)
        own._buffers = buffers
        return own

    def __del__(self) -> None:
        if self:  # not done
            _abandoned.append(self)

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        wait(self, status)
        return True

    def wait(self, status: MPI.Status | None = None) -> Any:
        return _outcome(lambda: self.test(status))

    @classmethod
    def Waitall(
        cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None
    ) -> Literal[True]:
        return _outcome(lambda: (cls.Testall(requests, statuses), True))

    @classmethod
    def waitall(
        cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None
    ) -> list[Any]:
        return _outcome(lambda: cls.testall(requests, statuses)) or []

    @classmethod
    def Waitany(cls, requests: Sequence[MPI.Request], status: MPI.Status | None = None) -> int:
        def test() -> tuple[bool, int]:
            index, done = cls.Testany(requests, status)
            return done, index

        return _outcome(test)
