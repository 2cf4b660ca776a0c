"""Packs a call of a user's function for its way to the ranks, and unpacks its result."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from alchemist_ray.errors import AlchemistError, BadArgumentError
from alchemist_ray.gang.libraries import Library, Routine
from alchemist_ray.gang.matrix_ref import MatrixRef
from alchemist_ray.object_refs import ObjectRef
from alchemist_ray.tracebacks import is_users_own
from mpi_workers.wire.frames import Body, Buffer

try:
    import cloudpickle
    from cloudpickle import Pickler
except ImportError:  # then `pack` refuses functions
    cloudpickle = None
    from pickle import Pickler

_registry = threading.RLock()
_inspected: set[str] = set()  # modules by name
_own: set[str] = set()  # those that are the user's


@dataclass(frozen=True, slots=True)
class Packed:
    """A function and its arguments, ready to travel.

    `code` and `given` are pickles, each with the buffers of its arrays. `uses` are the matrices
    that they name.
    """

    name: str
    code: list[Buffer]
    given: list[Buffer]
    uses: list[int] = field(default_factory=list)

    def task(self) -> Body:
        """The fields of the command."""
        return {"kind": "function", "name": self.name, "code": self.code, "given": self.given}


def pack(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    matrix: Callable[[MatrixRef], int],
    refs: list[Any] | None = None,
) -> Packed:
    """Pack a call of a function.

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

    pickler = functools.partial(_Pickler, used, refs)
    code = _pickled(function, pickler, lambda: _at_fault(name, function, pickler))
    both = (tuple(args), dict(kwargs))
    given = _pickled(both, pickler, lambda: _argument_at_fault(name, args, kwargs, pickler))
    return Packed(name, code, given, sorted(uses))


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


class _Pickler(Pickler):
    def __init__(self, matrix: Callable[[MatrixRef], int], refs: list[Any] | None) -> None:
        self.file, self.buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        # Ray cannot carry buffers: an `mpi_function` has them in the pickle.
        callback = self.buffers.append if refs is None else None
        super().__init__(self.file, protocol=5, buffer_callback=callback)
        self._matrix = matrix
        self._refs = refs

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if isinstance(value, MatrixRef):
            return ("matrix", self._matrix(value))
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


_NewPickler = Callable[[], _Pickler]


def _pickled(
    value: Any, pickler: _NewPickler, at_fault: Callable[[], str] | None = None
) -> list[Buffer]:
    into = pickler()
    try:
        with _modules_by_value():
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


@dataclass(frozen=True, slots=True)
class Work:
    """A call of a function for a GroupManager; see `mpi_function`."""

    packed: Packed
    timeout_s: float | None


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
