"""A user's own code, from this process to the ranks and back: functions, scripts, programs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from alchemist_ray.arguments import checked_mapping, checked_path
from alchemist_ray.errors import AlchemistError, BadArgumentError
from alchemist_ray.functions.packing import new_name, pack, result_of
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.libraries import checked_timeout
from alchemist_ray.gang.narration import narrated
from alchemist_ray.gang.progress import RoutineBar
from alchemist_ray.object_refs import resolved
from mpi_workers.wire.frames import Body


def run(
    connection: GangConnection,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout_s: float | None,
    *,
    pure: bool = False,
) -> Any:
    """See `AlchemistSession.run`."""
    limit_s = checked_timeout(timeout_s)
    packed = pack(
        function,
        [resolved(value) for value in args],
        {name: resolved(value) for name, value in kwargs.items()},
        connection.argument,
    )
    return run_task(
        connection, packed.task(), packed.code, packed.given, packed.uses, limit_s, pure=pure
    )


def run_script(
    connection: GangConnection,
    path: str | os.PathLike[str],
    argv: Sequence[Any],
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    timeout_s: float | None,
) -> None:
    """See `AlchemistSession.run_script`."""
    limit_s = checked_timeout(timeout_s)
    where = checked_path("path", path)
    try:
        text = where.read_bytes()
    except OSError as error:
        raise BadArgumentError(f"run_script cannot read {where}: {error.strerror}") from error
    task = {
        "kind": "script",
        "name": where.name,
        "path": str(where),
        "argv": words_of(argv),
        **process_settings(cwd, env),
    }
    run_task(connection, task, text, None, [], limit_s)


def words_of(argv: Sequence[Any]) -> list[str]:
    """The arguments of a script or program as strings."""
    if isinstance(argv, str | bytes):
        raise BadArgumentError(f"argv={argv!r}: it must be a list of arguments, not one string")
    given = list(argv) if isinstance(argv, Iterable) else [None]
    if any(arg is None for arg in given):
        raise BadArgumentError(f"argv={argv!r}: it must be a list of arguments, none of them None")
    words = [os.fspath(arg) if isinstance(arg, os.PathLike) else str(arg) for arg in given]
    for word in words:
        if "\0" in word:
            raise BadArgumentError(f"argv: {word!r} contains a zero byte")
    return words


def process_settings(cwd: str | os.PathLike[str] | None, env: Mapping[str, str] | None) -> Body:
    """The fields of a task for its working directory and environment."""
    variables = checked_mapping("env", env, "names and values of environment variables")
    return {
        "cwd": os.getcwd() if cwd is None else str(checked_path("cwd", cwd)),
        "cwd_needed": cwd is not None,
        "env": {str(key): str(value) for key, value in variables.items()},
    }


def run_task(
    connection: GangConnection,
    task: Body,
    code: bytes | None,
    given: bytes | None,
    uses: list[int],
    timeout_s: float | None,
    *,
    pure: bool = False,
) -> Any:
    """Run a task on all ranks, with its files; rank 0's result.

    `code` is kept on the nodes for the next call, `given` is there for this one.
    """
    uploads = connection.uploads
    task["result"] = new_name("result")
    body: Body = {"op": "run", "task": task, "uses": uses, "pure": pure}
    if timeout_s is not None:
        body["timeout_s"] = timeout_s
    once: list[str] = []
    bar = RoutineBar(task["name"], connection.options.progress)
    with contextlib.ExitStack() as during:
        during.enter_context(narrated(connection, f"{task['kind'].capitalize()} {task['name']}"))
        if code is not None:
            task["code"] = during.enter_context(uploads.code(code))
        try:
            if given is not None:
                task["given"] = new_name("given")
                once.append(task["given"])
                uploads.put(task["given"], given)
            try:
                reply = connection.request(body, bar)
                if "file" in reply["value"]:
                    once.append(task["result"])
            except BaseException as error:
                if not isinstance(error, AlchemistError):  # interrupted: it may have been written
                    once.append(task["result"])
                raise
            return result_of(reply, connection.handle, uploads.collect)
        finally:
            bar.close()
            if once:
                uploads.remove(once)
