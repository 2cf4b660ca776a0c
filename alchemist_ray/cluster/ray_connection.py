"""This process's connection to Ray: a program may end it and begin again, or fork."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

import ray
import ray._private.state
import ray._private.worker

from alchemist_ray.errors import SessionError


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


# --- forked children --------------------------------------------------------------------

FORKED = (
    "this process was forked from one that uses Ray, and Ray does not work after a fork: start it "
    "with multiprocessing.get_context('spawn'). A forked process can use its parent's handles"
)
# Methods that tell Ray something, and would wait without end for a thread that is not here.
_NEEDS_THREADS = frozenset(
    {"submit_task", "submit_actor_task", "cancel_task", "create_actor", "kill_actor",
     "get_named_actor_handle", "list_named_actors", "create_placement_group",
     "remove_placement_group", "wait_placement_group_ready"}
)  # fmt: skip

_forked = False
_parents: list[Any] = []  # kept: the end of a connection would be reported on it


def forked() -> bool:
    """Whether this process was forked from one that uses Ray."""
    return _forked


class _CoreWorkerAfterFork:
    """Ray's core worker in a forked child."""

    def __init__(self, parents: Any) -> None:
        self._parents = parents

    def __getattr__(self, name: str) -> Any:
        if name in _NEEDS_THREADS:
            raise SessionError(FORKED)
        return getattr(self._parents, name)

    def remove_actor_handle_reference(self, *_: Any) -> None: ...

    def remove_object_ref_reference(self, *_: Any) -> None: ...


class _StateAfterFork:
    """Ray's connection to its table of nodes in a forked child."""

    def __getattr__(self, name: str) -> Any:
        raise SessionError(FORKED)


def _after_fork_in_child() -> None:
    """Leave what the parent has in Ray to the parent, and refuse calls that cannot end.

    Ray's threads are not in the child, but its connections are: the end of an actor handle or an
    ObjectRef in the child would be reported on them. The parent's calls of Ray then wait without
    end, or the child does. So the child does not collect the parent's garbage either.
    """
    global _forked
    worker: Any = ray._private.worker.global_worker
    state: Any = ray._private.state.state
    if _forked or not worker.connected:
        return
    _forked = True
    gc.freeze()
    _parents.extend((worker.core_worker, getattr(state, "_global_state_accessor", None)))
    worker.core_worker = _CoreWorkerAfterFork(worker.core_worker)
    state._global_state_accessor = _StateAfterFork()


os.register_at_fork(after_in_child=_after_fork_in_child)
