"""Work beside the caller: in threads that no exit of the program waits for, and in tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

MOST_THREADS = 1000  # of a GroupManager; a gang that waits for CPUs has one

T = TypeVar("T")
_pool = ThreadPoolExecutor(MOST_THREADS, "gangs")  # starts those that are needed


def in_thread(
    action: Callable[[], T], kind: type[threading.Thread] = threading.Thread
) -> Future[T]:
    """Call a function in a daemon thread of this kind; the future of its result."""
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(action())
        except BaseException as error:
            done.set_exception(error)

    kind(target=work, daemon=True).start()
    return done


async def in_pool(function: Callable[..., T], *args: Any) -> T:
    """The result of a blocking function, which a thread of the pool calls."""
    return await asyncio.get_running_loop().run_in_executor(_pool, partial(function, *args))


async def in_time(work: Awaitable[T], limit_s: float) -> T:
    """Wait for the result of an awaitable, `limit_s` at most. Raises `TimeoutError`.

    Before Python 3.12, `asyncio.wait_for` loses a cancellation that comes together with the result.
    """
    async with asyncio.timeout(limit_s):
        return await work


async def unless(work: Awaitable[T], *ends: asyncio.Future[Any]) -> T:
    """The result of work. Raises the exception of one of `ends`, if that comes first."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task, *ends], return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        error = done.pop().exception()
        assert error is not None
        raise error.with_traceback(None)  # those of earlier ones would pile up
    finally:
        task.cancel()  # also if the caller is cancelled


def in_task(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Run a coroutine in a task of the running loop, which is among `tasks` until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
