"""This process's connection to Ray, which a program may end and begin again."""

from __future__ import annotations

import contextlib
import gc
import os
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


class _CoreWorkerAfterFork:
    """Ray's core worker in a forked child: it reports no reference that the child drops."""

    def __init__(self, parents: Any) -> None:
        self._parents = parents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parents, name)

    def remove_actor_handle_reference(self, *_: Any) -> None: ...

    def remove_object_ref_reference(self, *_: Any) -> None: ...


def _after_fork_in_child() -> None:
    """Leave what the parent has in Ray to the parent.

    Ray's threads are not in the child, but its connections are: the end of an actor handle or an
    ObjectRef in the child would be reported on them. The parent's calls of Ray then wait without
    end, or the child does. So the child does not collect the parent's garbage either.
    """
    gc.freeze()
    worker: Any = ray._private.worker.global_worker
    if worker.connected and hasattr(worker, "core_worker"):
        worker.core_worker = _CoreWorkerAfterFork(worker.core_worker)


os.register_at_fork(after_in_child=_after_fork_in_child)
