"""A user's own code, from this process to the ranks and back: functions, scripts, programs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from alchemist_ray.arguments import checked_mapping, checked_path
from alchemist_ray.errors import BadArgumentError
from alchemist_ray.functions.packing import pack, result_of
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.libraries import checked_timeout
from alchemist_ray.gang.progress import RoutineBar, narrated
from alchemist_ray.object_refs import resolved
from alchemist_ray.transfer.fetching import fetch
from alchemist_ray.transfer.sending import send
from mpi_workers.wire.frames import Body, Buffer
from mpi_workers.wire.names import places

INLINE = 1 << 20  # 1 MiB


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
    return run_task(connection, packed.task(), packed.uses, limit_s, pure=pure)


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
        "code": [text],
        "argv": words_of(argv),
        **process_settings(cwd, env),
    }
    run_task(connection, task, [], limit_s)


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
    uses: list[int],
    timeout_s: float | None,
    *,
    pure: bool = False,
) -> Any:
    """Run a task on all ranks; rank 0's result.

    Code, arguments and result travel in the command and its reply; those of more than `INLINE`
    bytes are matrices for the time of the call.
    """
    task["inline"] = INLINE
    large = {}
    for part in ("code", "given"):
        sizes = [memoryview(each).nbytes for each in task.get(part) or ()]
        if sum(sizes) > INLINE:
            large[part] = _as_matrix(connection, task[part], places(sizes))
            task[part] = {"matrix": large[part].id, "sizes": sizes}
    uses = [*uses, *(handle.id for handle in large.values())]
    body: Body = {"op": "run", "task": task, "uses": uses, "pure": pure}
    if timeout_s is not None:
        body["timeout_s"] = timeout_s
    bar = RoutineBar(task["name"], connection.options.progress)
    with (
        narrated(connection.options.verbose, f"{task['kind'].capitalize()} {task['name']}"),
        contextlib.closing(bar),
    ):
        reply = connection.request(body, bar)
    if "matrix" in (value := reply["value"]):
        raw = fetch(connection, connection.handle(value["matrix"])).view(np.uint8)
        value["parts"] = [raw[place] for place in places(value["sizes"])]
    return result_of(reply, connection.handle)


def _as_matrix(connection: GangConnection, parts: Sequence[Buffer], at: Sequence[slice]) -> Any:
    """A handle of a vector with these parts, of which every rank has a copy."""
    elements = np.empty(-(-at[-1].stop // 8), np.int64)
    for part, place in zip(parts, at, strict=True):
        elements.view(np.uint8)[place] = memoryview(part)
    kept = connection.address.recovers and connection.keeps_sources
    return send(connection, elements, layout="STAR_STAR", durable=kept)


def standard_input(stdin: bytes | str | os.PathLike[str] | None) -> bytes | None:
    """The bytes that a program's rank 0 reads. Raises `BadArgumentError`."""
    if stdin is None or isinstance(stdin, bytes):
        return stdin
    if isinstance(stdin, str):
        return stdin.encode()
    try:
        return checked_path("stdin", stdin).read_bytes()
    except OSError as error:
        raise BadArgumentError(f"run_program cannot read {stdin}: {error.strerror}") from error
