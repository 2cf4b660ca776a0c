"""A user's own code, from this process to the ranks and back: functions, scripts, programs.

A function and its arguments are pickled, with the user's own modules by value.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import pickle
import sys
import threading
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from alchemist_ray.arguments import checked_mapping, checked_path
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.libraries import Library, Routine
from alchemist_ray.attached.matrix_ref import MatrixRef, argument_ref
from alchemist_ray.attached.progress import RoutineBar, narrated
from alchemist_ray.errors import AlchemistError, BadArgumentError, RoutineError
from alchemist_ray.object_refs import ObjectRef, resolved
from alchemist_ray.tracebacks import is_users_own
from alchemist_ray.transfer.fetching import fetch
from alchemist_ray.transfer.sending import send
from mpi_workers.protocol.packing import places
from mpi_workers.wire.frames import Body, Buffer

INLINE = 1 << 20  # 1 MiB
CODE = frozenset({type, ABCMeta, FunctionType})
# Ranks never use them, and their import, with that of Ray, takes seconds on a busy machine.
OF_PROGRAMS = frozenset(
    {
        ("alchemist_ray.session.alchemist_session", "AlchemistSession"),
        ("alchemist_ray.ray_access.executor", "Executor"),
        ("alchemist_ray.ray_access.mpi_function", "mpi_function"),
    }
)
PLAIN = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict, type, CodeType})


def run(
    connection: GangConnection,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    limits: Body | None = None,
    *,
    pure: bool = False,
) -> Any:
    """See `AlchemistSession.run`; `limits`: see `call_limits`."""
    task, uses = packed_call(connection, function, args, kwargs)
    return run_task(connection, task, uses, limits, pure=pure)


def packed_call(
    connection: GangConnection,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Body, list[int]]:
    """See `pack`: for a gang with matrices. ObjectRefs are resolved here."""
    return pack(
        function,
        [resolved(value) for value in args],
        {name: resolved(value) for name, value in kwargs.items()},
        connection.argument,
    )


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
    limits: Body | None = None,
    *,
    pure: bool = False,
    own: bool = False,
) -> Any:
    """Run a task on all ranks; rank 0's result.

    `own`: the gang is one for functions, where a call has no matrices, and all of its time when
    its turn comes.
    """
    body, _large = command_of(connection, task, uses, limits, pure=pure)
    if own:
        body["own_turn"] = True
    bar = RoutineBar(task["name"], connection.options.progress)
    with (
        narrated(connection.options.verbose, f"{task['kind'].capitalize()} {task['name']}"),
        contextlib.closing(bar),
    ):
        reply = connection.request(body, bar)
    if own and reply["matrices"]:
        raise no_matrix(task["name"])
    return value_of(connection, reply)


def command_of(
    connection: GangConnection,
    task: Body,
    uses: list[int],
    limits: Body | None = None,
    *,
    pure: bool,
    given_nbytes: int = INLINE,
    result_nbytes: int = INLINE,
) -> tuple[Body, list[Any]]:
    """The command that runs a task, and handles that it needs until it is sent.

    Code, arguments and result travel in the command and its reply. Code or arguments of more than
    `given_nbytes`, and a result of more than `result_nbytes`, are matrices.
    """
    task["inline"] = result_nbytes
    large = {}
    for part in ("code", "given"):
        sizes = [memoryview(each).nbytes for each in task.get(part) or ()]
        if sum(sizes) > given_nbytes:
            large[part] = _as_matrix(connection, task[part], places(sizes))
            task[part] = {"matrix": large[part].id, "sizes": sizes}
    handles = list(large.values())
    uses = [*uses, *(handle.id for handle in handles)]
    body = {"op": "run", "task": task, "uses": uses, "pure": pure, **(limits or {})}
    return body, handles


def value_of(connection: GangConnection, reply: Body) -> Any:
    """Rank 0's result, from the reply to such a command."""
    if "matrix" in (value := reply["value"]):
        raw = fetch(connection, connection.handle(value["matrix"])).view(np.uint8)
        value["parts"] = [raw[place] for place in places(value["sizes"])]
    return result_of(reply, connection.handle)


def no_matrix(name: str) -> RoutineError:
    """The error of a function whose gang ends before its result could be used."""
    return RoutineError(
        f"{name} must not return a DistMatrix, because its gang ends: return an array (gathered on "
        "rank 0), or run it with als.run on a session's gang"
    )


def _as_matrix(connection: GangConnection, parts: Sequence[Buffer], at: Sequence[slice]) -> Any:
    """A handle of a vector with these parts, of which every rank has a copy."""
    elements = np.empty(-(-at[-1].stop // 8), np.int64)
    for part, place in zip(parts, at, strict=True):
        elements.view(np.uint8)[place] = memoryview(part)
    kept = connection.address.recovers and connection.transport.manager is not None
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


try:
    import cloudpickle
    from cloudpickle import Pickler
except ImportError:  # then `pack` refuses functions
    cloudpickle = None
    from pickle import Pickler

# --- packing ---

_registry = threading.RLock()
_inspected: set[str] = set()  # modules by name
_own: set[str] = set()  # those that are the user's


def pack(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    matrix: Callable[[MatrixRef], int],
    refs: list[Any] | None = None,
) -> tuple[Body, list[int]]:
    """Pack a call of a function: the task of its command, and the matrices that it names.

    Code and arguments are pickles, each with the buffers of its arrays.

    Parameters
    ----------
    function : callable
    args, kwargs
        Its arguments.
    matrix : callable(MatrixRef) -> int
        Gives the id of a handle's matrix on the gang, or raises.
    refs : list of ObjectRef, optional
        Collects the refs among the arguments, for the process that resolves them. None: refs
        are refused.

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
    if cloudpickle is None:
        raise BadArgumentError(
            "functions are sent with cloudpickle, which is not installed here: pip install "
            "cloudpickle"
        )
    name = name_of(function)
    uses: set[int] = set()

    def used(handle: MatrixRef) -> int:
        ident = matrix(handle)
        uses.add(ident)
        return ident

    pickler = functools.partial(_CallPickler, used, refs)
    both = (tuple(args), dict(kwargs))
    with _modules_by_value():
        code = _pickled(function, pickler, lambda: _at_fault(name, function, pickler))
        given = _pickled(both, pickler, lambda: _argument_at_fault(name, args, kwargs, pickler))
    task = {"kind": "function", "name": name, "code": code, "given": given}
    return task, sorted(uses)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in messages."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


@contextlib.contextmanager
def _modules_by_value() -> Iterator[None]:
    """A context in which cloudpickle copies the user's own modules into the pickle."""
    with _registry:
        for name in sys.modules.keys() - _inspected:
            module = sys.modules.get(name)
            if (
                isinstance(module, ModuleType)
                and module.__name__ == name != "__main__"
                and is_users_own(name, getattr(module, "__file__", None))
            ):
                _own.add(name)
            _inspected.add(name)
        known = cloudpickle.list_registry_pickle_by_value()
        own = [sys.modules[name] for name in _own - known if name in sys.modules]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)


class _CallPickler(Pickler):
    """Replaces handles by ids, and ObjectRefs by indices; keeps large buffers out of band."""

    def __init__(self, matrix: Callable[[MatrixRef], int], refs: list[Any] | None) -> None:
        self.file, self.buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        # Ray cannot carry buffers: an `mpi_function` has them in the pickle.
        callback = self.buffers.append if refs is None else None
        super().__init__(self.file, protocol=5, buffer_callback=callback)
        self._matrix = matrix
        self._refs = refs

    def persistent_id(self, value: Any) -> tuple[str, Any] | None:
        kind = type(value)
        if kind in CODE and (where := (value.__module__, value.__name__)) in OF_PROGRAMS:
            return ("later", where)
        if kind in PLAIN:  # nearly all that is pickled
            return None
        if (ref := argument_ref(value)) is not None:
            return ("matrix", self._matrix(ref))
        if isinstance(value, Library | Routine):
            name = value.name if isinstance(value, Library) else value.__qualname__
            raise BadArgumentError(
                f"{name!r} is called by processes outside of the gang, and its call would wait for "
                "this one: call the library's Python functions on the ranks instead"
            )
        if isinstance(value, ObjectRef):
            if self._refs is None:
                raise BadArgumentError(
                    "ranks cannot resolve an ObjectRef inside an argument or inside an object that "
                    "the function uses: pass it as an argument of its own, or ray.get it first"
                )
            if value not in self._refs:
                self._refs.append(value)
            return ("value", self._refs.index(value))
        return None


_NewPickler = Callable[[], _CallPickler]


def _pickled(
    value: Any, pickler: _NewPickler, at_fault: Callable[[], str] | None = None
) -> list[Buffer]:
    into = pickler()
    try:
        into.dump(value)
    except AlchemistError:
        raise
    except Exception as error:  # pickling calls into any class
        if at_fault is None:
            raise
        raise BadArgumentError(
            f"{at_fault()} cannot be pickled: {type(error).__name__}: {error}. Create it inside "
            "the function, or pass the data from which it is made"
        ) from error
    return [into.file.getvalue(), *(buffer.raw() for buffer in into.buffers)]


def _fails(value: Any, pickler: _NewPickler) -> bool:
    try:
        _pickled(value, pickler)
    except Exception:
        return True
    return False


def _at_fault(name: str, function: Callable[..., Any], pickler: _NewPickler) -> str:
    """Describes the part of a function that cannot be pickled."""
    with contextlib.suppress(TypeError, ValueError):
        found = inspect.getclosurevars(function)
        for where, variables in (("outer", found.nonlocals), ("global", found.globals)):
            for variable, value in variables.items():
                if _fails(value, pickler):
                    kind = type(value).__name__
                    return f"{name} uses the {where} variable {variable!r} (a {kind}), which"
    return name


def _argument_at_fault(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], pickler: _NewPickler
) -> str:
    named: list[tuple[str, Any]] = [(f"number {i}", value) for i, value in enumerate(args, 1)]
    for what, value in [*named, *((repr(key), value) for key, value in kwargs.items())]:
        if _fails(value, pickler):
            return f"{name}: its argument {what} (a {type(value).__name__})"
    return f"{name}: its arguments together"


# --- results ---


def result_of(reply: Body, handle: Callable[[Body], Any]) -> Any:
    """The value that a function returned on rank 0, with handles for its matrices."""
    handles = [handle(record) for record in reply["matrices"]]
    return _Unpickler(reply["value"]["parts"], handles).load()


def packed_values(values: Sequence[Any]) -> list[Buffer]:
    """The values of a call's object refs, as a pickle for the ranks."""
    file = io.BytesIO()
    Pickler(file, protocol=5).dump(list(values))
    return [file.getvalue()]


class _Unpickler(pickle.Unpickler):
    def __init__(self, parts: Sequence[Any], handles: Sequence[Any]) -> None:
        mine = (bytearray(part) if isinstance(part, bytes) else part for part in parts[1:])
        super().__init__(io.BytesIO(parts[0]), buffers=mine)
        self._handles = handles

    def persistent_load(self, ident: tuple[str, int]) -> Any:
        return self._handles[ident[1]]
