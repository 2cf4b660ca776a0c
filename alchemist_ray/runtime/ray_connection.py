"""This process's connection to Ray, which a program may end and begin again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
import ray._private.worker


def connection_id() -> tuple[str, str]:
    """The node and the job of this process.

    At least one of them changes with ``ray.shutdown()`` and ``ray.init()``, also to the same
    cluster. Actor handles of an earlier connection cannot be used.
    """
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


@contextlib.contextmanager
def while_connected() -> Iterator[bool]:
    """A context in which ``ray.shutdown()`` of other threads waits; whether Ray is connected.

    Threads that the program does not know of need it: Ray ends the process if a thread calls it,
    or drops an ObjectRef, during ``ray.shutdown()``.
    """
    lock: Any = getattr(ray._private.worker, "_connect_or_shutdown_lock", None)
    with lock or contextlib.nullcontext():
        yield ray.is_initialized()
