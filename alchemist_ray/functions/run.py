"""`als.run` and `als.run_script`: a user's own code, from this process to the ranks and back."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import pickle
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import ray
from numpy.typing import NDArray

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.errors import AlchemistError, BadArgumentError
from alchemist_ray.functions.node_files import new_name
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.control_channel import ask
from alchemist_ray.gang.libraries import checked_timeout, handle_of
from alchemist_ray.gang.progress import RoutineBar
from mpi_workers.wire.frames import Body
from mpi_workers.wire.values import NotPlain, decode, encode

if TYPE_CHECKING:
    from alchemist_ray.gang.connection import GangConnection

OURS = ("alchemist_ray", "mpi_workers", "ali")


# --- packing ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packed:
    """A function and its arguments, ready to travel.

    `given` is a pickle of the arguments, or None where they are `plain` and travel in the
    command itself. `uses` are the matrices that they name.
    """

    name: str
    code: bytes
    plain: Any
    given: bytes | None
    uses: list[int] = field(default_factory=list)

    def task(self) -> Body:
        """What the ranks are told of it, less the names of files."""
        return {"script": False, "name": self.name, "plain": self.plain}


def pack(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    matrix: Callable[[Handle], int],
    refs: list[Any] | None = None,
) -> Packed:
    """Pack a call of a function.

    Parameters
    ----------
    function : callable
    args, kwargs
        Its arguments.
    matrix : callable(Handle) -> int
        Gives the id of a handle's matrix on the gang, or raises.
    refs : list of ObjectRef, optional
        Where refs among the arguments are noted, for whoever resolves them; without it
        they are refused.

    Raises
    ------
    BadArgumentError
        If it is not a function, or something of it cannot be pickled: says what.
    """
    if not callable(function):
        raise BadArgumentError(
            f"a function that runs on ranks is called as f(comm, ...), and a "
            f"{type(function).__name__} cannot be called"
        )
    name = name_of(function)
    uses: set[int] = set()

    def used(handle: Handle) -> int:
        ident = matrix(handle)
        uses.add(ident)
        return ident

    code = _pickled(function, used, refs, lambda: _at_fault(name, function, matrix, refs))
    both = (tuple(args), dict(kwargs))
    with contextlib.suppress(NotPlain):
        plain = encode(both, lambda v: used(v) if isinstance(v, Handle) else None)
        return Packed(name, code, plain, None, sorted(uses))
    given = _pickled(
        both, used, refs,
        lambda: _argument_at_fault(name, args, kwargs, matrix, refs),
    )  # fmt: skip
    return Packed(name, code, None, given, sorted(uses))


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called in messages."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self, file: io.BytesIO, matrix: Callable[[Handle], int], refs: list[Any] | None
    ) -> None:
        super().__init__(file, protocol=5)
        self._matrix = matrix
        self._refs = refs

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if isinstance(value, Handle):
            return ("matrix", self._matrix(value))
        if isinstance(value, ray.ObjectRef):
            if self._refs is None:
                raise BadArgumentError(
                    "an ObjectRef inside of an argument, or of what the function refers to, means "
                    "nothing to a rank: pass it as an argument of its own, or ray.get it first"
                )
            if value not in self._refs:
                self._refs.append(value)
            return ("value", self._refs.index(value))
        return None


def _pickled(
    value: Any,
    matrix: Callable[[Handle], int],
    refs: list[Any] | None,
    at_fault: Callable[[], str] | None = None,
) -> bytes:
    file = io.BytesIO()
    try:
        with _own_modules_by_value():
            _Pickler(file, matrix, refs).dump(value)
    except AlchemistError:
        raise
    except Exception as error:  # pickling calls into any class
        if at_fault is None:
            raise
        raise BadArgumentError(
            f"{at_fault()} cannot be pickled: {type(error).__name__}: {error}. Create it inside of "
            "the function, or pass what it is made from"
        ) from error
    return file.getvalue()


def _fails(value: Any, matrix: Callable[[Handle], int], refs: list[Any] | None) -> bool:
    try:
        _pickled(value, matrix, refs)
    except Exception:
        return True
    return False


def _at_fault(
    name: str,
    function: Callable[..., Any],
    matrix: Callable[[Handle], int],
    refs: list[Any] | None,
) -> str:
    """What of a function cannot be pickled, in words."""
    with contextlib.suppress(TypeError, ValueError):
        found = inspect.getclosurevars(function)
        for where, variables in (("outer", found.nonlocals), ("global", found.globals)):
            for variable, value in variables.items():
                if _fails(value, matrix, refs):
                    kind = type(value).__name__
                    return f"{name} uses the {where} variable {variable!r} (a {kind}), which"
    return name


def _argument_at_fault(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    matrix: Callable[[Handle], int],
    refs: list[Any] | None,
) -> str:
    named: list[tuple[str, Any]] = [(f"number {i}", value) for i, value in enumerate(args, 1)]
    for what, value in [*named, *((repr(key), value) for key, value in kwargs.items())]:
        if _fails(value, matrix, refs):
            return f"{name}: its argument {what} (a {type(value).__name__})"
    return f"{name}: its arguments together"


# --- whose module it is -----------------------------------------------------------------

_registry = threading.RLock()
_looked_at: set[str] = set()  # modules by name
_own: set[str] = set()  # those that are the user's


def _installed() -> tuple[str, ...]:
    """Folders whose modules a rank can import as well as we can."""
    paths = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.join(path, "") for path in paths if path)


_INSTALLED = _installed()


def _users_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or module.__name__.partition(".")[0] in OURS:
        return False
    return not file.startswith(_INSTALLED)


@contextlib.contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """Pickle functions and classes of the user's own modules whole: ranks need not have them."""
    with _registry:
        for name in sys.modules.keys() - _looked_at:
            module = sys.modules.get(name)
            if (
                isinstance(module, ModuleType)
                and module.__name__ == name != "__main__"
                and _users_own(module)
            ):
                _own.add(name)
            _looked_at.add(name)
        known = cloudpickle.list_registry_pickle_by_value()
        own = [sys.modules[name] for name in _own - known if name in sys.modules]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)


# --- running ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """A call of a function as a GroupManager is given it; see `remote.mpi_function`."""

    packed: Packed
    timeout_s: float | None


def run(
    client: GangConnection,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout_s: float | None,
) -> Any:
    """See `AlchemistSession.run`."""
    limit_s = checked_timeout(timeout_s)
    packed = pack(
        function,
        [_resolved(value) for value in args],
        {name: _resolved(value) for name, value in kwargs.items()},
        lambda handle: client.check(handle).id,
    )
    return _run(client, packed.task(), packed.code, packed.given, packed.uses, limit_s)


def _resolved(value: Any) -> Any:
    return ask(value) if isinstance(value, ray.ObjectRef) else value


def run_script(
    client: GangConnection,
    path: str | os.PathLike[str],
    argv: Sequence[Any],
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    timeout_s: float | None,
) -> None:
    """See `AlchemistSession.run_script`."""
    limit_s = checked_timeout(timeout_s)
    where = Path(path).expanduser().absolute()
    try:
        text = where.read_bytes()
    except OSError as error:
        raise BadArgumentError(f"run_script cannot read {where}: {error.strerror}") from error
    if isinstance(argv, str | bytes):
        raise BadArgumentError(f"argv={argv!r}: it is a list of arguments, not one string")
    task = {
        "script": True,
        "name": where.name,
        "path": str(where),
        "argv": [os.fspath(arg) if isinstance(arg, os.PathLike) else str(arg) for arg in argv],
        "cwd": os.getcwd() if cwd is None else str(Path(cwd).expanduser().absolute()),
        "cwd_needed": cwd is not None,
        "env": {str(key): str(value) for key, value in (env or {}).items()},
    }
    _run(client, task, text, None, [], limit_s)


def _run(
    client: GangConnection,
    task: Body,
    code: bytes,
    given: bytes | None,
    uses: list[int],
    timeout_s: float | None,
) -> Any:
    staging = client.staging
    task["result"] = new_name("result")
    body: Body = {"op": "run", "task": task, "uses": uses}
    if timeout_s is not None:
        body["timeout_s"] = timeout_s
    once: list[str] = []
    bar = RoutineBar(task["name"], client.progress)
    with staging.code(code) as task["code"]:
        try:
            if given is not None:
                task["given"] = new_name("given")
                once.append(task["given"])
                staging.put(task["given"], given)
            try:
                reply = client.request(body, bar)
                if "file" in reply["value"]:
                    once.append(task["result"])
            except KeyboardInterrupt:  # who knows how far it was
                once.append(task["result"])
                raise
            return result_of(reply, client.gang_address, staging.collect)
        finally:
            bar.close()
            if once:
                staging.remove(once)


# --- results ----------------------------------------------------------------------------


def result_of(
    reply: Body, gang_address: GangAddress, collect: Callable[[str], list[NDArray[np.uint8]]]
) -> Any:
    """What a function has returned, with handles for its matrices."""
    handles = [handle_of(about, gang_address) for about in reply["matrices"]]
    value = reply["value"]
    if "plain" in value:
        return decode(value["plain"], handles.__getitem__)
    return unpickled(collect(value["file"]), handles)


def packed_values(values: Sequence[Any]) -> bytes:
    """What a call's object refs stood for, as a pickle for the ranks."""
    return bytes(cloudpickle.dumps(list(values), protocol=5))


def unpickled(parts: list[NDArray[np.uint8]], handles: Sequence[Handle]) -> Any:
    """A result from its pickle and buffers. Arrays in it are the caller's own, to write to."""
    from alchemist_ray.gang.connection import result_array  # noqa: PLC0415  (the gang runs functions)

    buffers = []
    for part in parts[1:]:  # Ray's are read-only
        mine = result_array((part.size, 1), np.dtype(np.uint8)).reshape(-1)
        np.copyto(mine, part)
        buffers.append(mine)
    return _Unpickler(parts[0], buffers, handles).load()


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: NDArray[np.uint8], buffers: list[Any], handles: Sequence[Handle]
    ) -> None:
        super().__init__(io.BytesIO(data.tobytes()), buffers=buffers)
        self._handles = handles

    def persistent_load(self, ident: tuple[str, int]) -> Handle:
        return self._handles[ident[1]]
