"""Commands that the gateway carries out itself: options of gangs, and files of users' code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from alchemist_ray.functions.uploads import Uploads
from alchemist_ray.gang.options import GangOptions, Workers, through_gateway
from alchemist_ray.gateway.protocol import PART_NBYTES
from alchemist_ray.gateway.server.relay import Client
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

MAX_STAGED_NBYTES = 256 << 20  # 256 MiB of a client's files that are under way
MAX_RESULTS = 16  # of functions, that a client has not read to the end

InThread = Callable[..., Awaitable[Any]]


def gang_options(given: object, workers: Workers) -> GangOptions:
    """The options of a gang as a client sent them. Raises `Failure`, `ValueError`."""
    known = set(through_gateway())
    if not isinstance(given, dict) or given.keys() != known:
        different = sorted(known ^ given.keys()) if isinstance(given, dict) else ["all"]
        raise Failure(
            "BadArgumentError",
            f"the client and this gateway differ in the options of a gang ({', '.join(different)}):"
            f" install version {__version__} of alchemist-client",
        )
    return GangOptions(workers, progress=False, output=False, **given)


async def answer(client: Client, body: Body, in_thread: InThread) -> Body:
    """Carry out ``stage``, ``collect`` or ``read_part``. Raises `Failure`, `AlchemistError`."""
    uploads: Uploads = client.gang.connection.uploads
    match body["op"]:
        case "stage":
            return await _stage(client, body, uploads, in_thread)
        case "collect":
            results = client.gang.results
            parts = await in_thread(uploads.collect, _name(body["name"], "result"))
            while len(results) >= MAX_RESULTS:
                results.pop(next(iter(results)))
            results[body["name"]] = parts
            return {"sizes": [int(part.nbytes) for part in parts]}
        case _:
            return _read_part(client, body)


async def _stage(client: Client, body: Body, uploads: Uploads, in_thread: InThread) -> Body:
    """A part of a file; the last one sends it to the nodes."""
    name, content = body["name"], body["content"]
    if not isinstance(content, bytes):
        raise Failure("TransferError", "the content of a file must be bytes")
    staged = client.staged.setdefault(_name(name, "code", "given"), bytearray())
    held = sum(map(len, client.staged.values())) + len(content)
    if held > MAX_STAGED_NBYTES or body["offset"] != len(staged):
        client.staged.pop(name, None)
        raise Failure(
            "ResourceError",
            f"functions and arguments of {held} bytes exceed the limit of {MAX_STAGED_NBYTES} "
            "bytes: send large data with send_matrix",
        )
    staged += content
    if body["last"]:
        await in_thread(uploads.put, name, bytes(client.staged.pop(name)))
    return {}


def _name(name: object, *kinds: str) -> str:
    """The name of a file of a run: no path. Raises `Failure`."""
    if isinstance(name, str):
        kind, _, rest = name.partition("-")
        if kind in kinds and len(rest) == 32 and rest.isalnum():
            return name
    raise Failure("TransferError", f"{name!r} is not a file name of a running call")


def _read_part(client: Client, body: Body) -> Body:
    results = client.gang.results
    if body["name"] not in results:
        raise Failure(
            "TransferError",
            f"{body['name']} was read to the end, or replaced by later results: the gateway keeps "
            f"the last {MAX_RESULTS}. Fetch each result before you start {MAX_RESULTS} more calls",
        )
    parts, number, offset = results[body["name"]], body["part"], body["offset"]
    if not 0 <= number < len(parts) or offset < 0:
        raise Failure("TransferError", f"the result has no part {number}")
    content = parts[number][offset : offset + PART_NBYTES].tobytes()
    if number == len(parts) - 1 and offset + len(content) >= parts[number].nbytes:
        del results[body["name"]]
    return {"content": content}
