"""A loaded library: Python methods, built from the signatures that the library declares."""

from __future__ import annotations

import html
import inspect
import sys
import warnings
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FrameType, GenericAlias
from typing import Any

import numpy as np

from alchemist_ray.arguments import checked_seconds
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.matrix_ref import MatrixRef, argument_ref, columns_to_wire, ref_of
from alchemist_ray.attached.progress import RoutineBar, call_text, narrated
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.errors import (
    BadArgumentError,
    LibraryError,
    LibraryNotFoundError,
    NoSuchRoutineError,
    from_failure,
)
from mpi_workers.failures import Failure
from mpi_workers.protocol.commands import CALL_LIMITS_S
from mpi_workers.protocol.libraries import SLICE_WARNINGS
from mpi_workers.protocol.signature import (
    MATRIX,
    REQUIRED,
    SPARSE,
    Signature,
    is_sparse,
    no_routine,
)
from mpi_workers.wire.frames import Body

_SCALARS = {
    "int": int, "float": float, "complex": complex, "bool": bool, "string": str, "bytes": bytes,
}  # fmt: skip


def _annotation(kind: str, handle_type: type) -> Any:
    if kind in (MATRIX, SPARSE):
        return handle_type
    if kind.startswith("list["):
        return GenericAlias(list, _SCALARS[kind[5:-1]])
    return _SCALARS[kind]


@lru_cache(maxsize=1024)
def _named(*names: str) -> Any:
    """The type of several results: a tuple whose items have names."""
    make: Any = namedtuple  # names are not literals
    kind = make("Results", names, rename=True)
    kind.__reduce__ = lambda self: (_unpickled, (names, tuple(self)))
    kind.__repr__ = _results_text
    kind._repr_html_ = _results_html
    return kind


def _results_text(results: Any) -> str:
    """A line for each result: of matrices, their description without elements."""
    lines = [f"  {name}={_line(value)}" for name, value in results._asdict().items()]
    return "Results(\n" + ",\n".join(lines) + ",\n)"


def _results_html(results: Any) -> str:
    rows = "".join(
        f"<tr><th>{name}</th><td>{html.escape(_line(value))}</td></tr>"
        for name, value in results._asdict().items()
    )
    return f"<table>{rows}</table>"


def _line(value: Any) -> str:
    return value.described() if isinstance(value, MatrixRef) else repr(value)


def _unpickled(names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _named(*names)(*values)


def results_of(reply: Body, handle: Callable[[Body], Any]) -> Any:
    """A routine's results as the user gets them: one value, a named tuple, or None.

    `handle` makes a handle of the description of a matrix.
    """
    values = tuple(
        handle({**value["matrix"], "elements": value.get("elements")})
        if isinstance(value, dict)
        else value
        for value in reply["values"]
    )
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    return _named(*reply["names"])(*values)


def reported(reply: Body, where: str, handle: Callable[[Body], Any]) -> Any:
    """See `results_of`; floating-point errors are treated as `numpy.errstate` of this thread says.

    `where`: the routine, for their messages.
    """
    results = results_of(reply, handle)
    if "floating" in reply:
        _report_floating(reply["floating"], where)
    return results


@dataclass(frozen=True, slots=True)
class _Received:
    """The connection of a library that was pickled: its process connects when it is used."""

    name: str
    session: str
    gang: str
    epoch: int
    handle_type: type[MatrixRef]

    def __getattr__(self, attribute: str) -> Any:
        return getattr(gang_of(self), attribute)


def _for_other_processes(connection: GangConnection | _Received, library: str) -> _Received:
    if isinstance(connection, _Received):
        return connection
    of = connection.address
    return _Received(f"library {library}", of.session, of.gang, of.epoch, connection.handle_type)


FLOATING = {  # NumPy's kinds of floating-point errors: flag, text
    "divide": (1, "divide by zero"), "over": (2, "overflow"), "under": (4, "underflow"),
    "invalid": (8, "invalid value"),
}  # fmt: skip


def calling_frame() -> FrameType:
    """Where the program is: the first frame that is not ours."""
    frame = sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("alchemist_ray."):
        frame = frame.f_back
    return frame


def _report_floating(flags: int, where: str) -> None:
    """Treat floating-point errors on the ranks as `numpy.errstate` of this thread says.

    NumPy's warnings of empty slices do not depend on it.
    """
    for text, flag in SLICE_WARNINGS.items():
        if flags & flag:
            _warn(text)
    for kind, (flag, text) in FLOATING.items():
        action = np.geterr()[kind] if flags & flag else "ignore"  # type: ignore[literal-required]
        message = f"{text} encountered in {where}"
        if action == "raise":
            raise FloatingPointError(message)
        if action == "warn":
            _warn(message)
        elif action == "call":
            np.geterrcall()(text, flags)  # type: ignore[operator, misc]
        elif action in ("print", "log"):
            target: Any = sys.stdout if action == "print" else np.geterrcall()
            target.write(f"Warning: {message}\n")


def _warn(message: str) -> None:
    """Warn of the line of the program that is carried out."""
    frame = calling_frame()
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    where_from = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, RuntimeWarning, *where_from, registry=seen)


class Routine:
    """One routine of a library. Calling it runs it on every rank and waits.

    `remote` takes the same arguments, returns a Ray ObjectRef at once, and the
    results come with `ray.get`. `options(timeout_s=...)` gives the same routine with a
    limit to what a call may take.
    """

    def __init__(
        self,
        connection: GangConnection,
        library: str,
        signature: Signature,
        limits: Body | None = None,
        *,
        columns: Sequence[str] = (),
        read_only: bool = False,
    ) -> None:
        self._connection = connection
        # Read-only libraries are parts of the connection.
        own = not (read_only or isinstance(connection, _Received))
        self._holder = connection.holder() if own else None
        self._columns = columns
        self._read_only = read_only
        self._library = library
        self._routine = signature
        self._limits = limits or {}
        self.__name__ = signature.name
        self.__qualname__ = f"{library}.{signature.name}"
        self.__doc__ = f"{signature}\n\n{signature.doc}"
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    p.name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if p.default is REQUIRED else p.default,
                    annotation=_annotation(p.type, connection.handle_type),
                )
                for p in signature.parameters
            ],
            return_annotation=tuple(
                _annotation(r.type, connection.handle_type) for r in signature.results
            )
            or None,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        body = self.command(args, kwargs)
        bar = RoutineBar(self.__qualname__, self._connection.options.progress)
        verbose = self._connection.options.verbose  # else no argument is made a string
        text = call_text(self.__qualname__, args, kwargs) if verbose else ""
        with narrated(verbose, text):
            try:
                reply = self._connection.request(body, bar)
            finally:
                bar.close()
        name = str(body["arguments"].get("op", self.__name__))
        return reported(reply, name, self._connection.handle)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the routine; an ObjectRef of what a call returns."""
        body = self.command(args, kwargs)
        ref: Any = self._connection.start_call(body)
        refs = map(ref_of, (*args, *kwargs.values()))
        held = [ref for ref in refs if ref is not None and ref.temporary]
        if held:  # their matrices are needed until the call ends
            ref.future().add_done_callback(lambda _: held.clear())
        return ref

    def options(
        self, *, timeout_s: float | None = None, stuck_timeout_s: float | None = None,
        columns: Sequence[str] = (),
    ) -> Routine:  # fmt: skip
        """This routine, cancelled with `CallTimeoutError` if a call takes longer than `timeout_s`.

        The time in which other calls hold the gang counts as well. `stuck_timeout_s` is that of
        `AlchemistSession`, for these calls. `columns` are names for the columns of the first
        result.
        """
        limits = call_limits(timeout_s, stuck_timeout_s)
        return Routine(
            self._connection, self._library, self._routine, limits, columns=columns,
            read_only=self._read_only,
        )  # fmt: skip

    @property
    def gang(self) -> str:
        """The gang on which it runs."""
        return self._connection.address.gang

    def command(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Body:
        """The command of a call. Raises `BadArgumentError`, and what `argument` does."""

        def matrix(value: Any) -> dict[str, int]:
            if (ref := argument_ref(value)) is not None:
                if self._read_only:
                    return {"matrix": self._connection.check(ref).id}
                return {"matrix": self._connection.argument(ref)}
            local = isinstance(value, np.ndarray) or is_sparse(value)
            hint = ": send it first, with send_matrix" if local else ""
            raise TypeError(f"{type(value).__name__}{hint}")

        try:
            arguments = self._routine.bind(args, kwargs, matrix)
        except Failure as failure:
            raise from_failure(failure) from None
        return {
            "op": "call",
            "library": self._library,
            "routine": self._routine.name,
            "arguments": arguments,
            **self._limits,
            **({"columns": columns_to_wire(self._columns)} if self._columns else {}),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(Routine, columns=self._columns, read_only=self._read_only)
        connection = _for_other_processes(self._connection, self._library)
        return make, (connection, self._library, self._routine, self._limits)

    def __repr__(self) -> str:
        return f"<routine {self._library}.{self._routine}>"


def call_limits(timeout_s: Any = None, stuck_timeout_s: Any = None) -> Body:
    """The time limits of a call, as fields of its command. Raises `BadArgumentError`."""
    given = {"timeout_s": timeout_s, "stuck_timeout_s": stuck_timeout_s}
    return {
        name: checked_seconds(name, value, BadArgumentError, most=CALL_LIMITS_S[name])
        for name, value in given.items()
        if value is not None
    }


class Library:
    """A library that is loaded on a gang; its routines are attributes.

    Libraries and routines can be pickled, for example into a Ray task: the process that gets one
    connects to the gang at the first call.

    Attributes
    ----------
    name : str

    Parameters
    ----------
    connection : GangConnection
    described : Body
        Name, documentation and signatures.
    read_only : bool
        Whether no routine writes to its arguments.
    """

    def __init__(
        self, connection: GangConnection, described: Body, *, read_only: bool = False
    ) -> None:
        self.name: str = described["name"]
        self.__doc__ = described["doc"]
        self._made_of = connection, described, read_only
        self._routines = {
            fields["name"]: Routine(
                connection, self.name, Signature.from_map(fields), read_only=read_only
            )
            for fields in described["routines"]
        }

    def routine(self, name: str) -> Routine:
        """The routine of that name. Raises `NoSuchRoutineError`, which lists the routines."""
        try:
            return self._routines[name]
        except KeyError:
            raise NoSuchRoutineError(no_routine(self.name, name, self._routines)) from None

    def __getattr__(self, name: str) -> Routine:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.routine(name)

    def __reduce__(self) -> tuple[Any, ...]:
        connection, described, read_only = self._made_of
        received = _for_other_processes(connection, self.name)
        return partial(Library, read_only=read_only), (received, described)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._routines]

    def __repr__(self) -> str:
        return f"<library {self.name}: {', '.join(sorted(self._routines))}>"

    def _repr_html_(self) -> str:
        rows = "".join(f"<li><code>{r._routine}</code></li>" for r in self._routines.values())
        return f"<b>library {self.name}</b><ul>{rows}</ul>"


def shipped(connection: GangConnection, name: str) -> Any:
    """A library of this package for handles and sessions; the gang loads it at the first use.

    Raises `LibraryNotFoundError`.
    """
    loaded = connection.part(_loaded)
    if name not in loaded:
        try:
            described = connection.request({"op": "load", "library": name, "path": None})
            loaded[name] = Library(connection, described, read_only=True)
        except LibraryNotFoundError as error:
            loaded[name] = error
    if isinstance(loaded[name], LibraryNotFoundError):
        raise loaded[name]
    return loaded[name]


def _loaded(_connection: GangConnection) -> dict[str, Any]:
    return {}  # by name: the library, or the error that says why it is missing


def named(library: Any) -> str:
    """The name of a library that is given as an object or by name."""
    if isinstance(library, Library):
        return library.name
    if isinstance(library, str):
        return library
    raise LibraryError(f"{library!r} is not a library: pass the result of load_library")
