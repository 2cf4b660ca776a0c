"""Work beside the caller."""

from __future__ import annotations

import asyncio

from alchemist_ray.background import in_time


def test_a_cancellation_that_comes_with_the_result_is_kept() -> None:
    """The start of a gang that was being ended went on: `asyncio.wait_for` had lost it."""

    async def cancelled() -> bool:
        result = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(in_time(result, 20))
        await asyncio.sleep(0)
        result.set_result("held")
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancelled())
