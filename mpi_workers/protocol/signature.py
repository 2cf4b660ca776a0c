"""A routine's signature in frames: named, typed parameters and results.

The rank side declares it (`ali`), and the client builds a method from it. Both check values with
the same code, so a wrong argument is refused before anything is sent.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpi_workers.failures import Failure

MATRIX = "matrix"
SPARSE = "sparse"  # a sparse matrix
SCALARS = ("int", "float", "complex", "bool", "string", "bytes")
TYPES = (MATRIX, SPARSE, *SCALARS, *(f"list[{scalar}]" for scalar in SCALARS))
_INT_RANGE = range(-(1 << 63), 1 << 63)


def no_routine(library: str, name: str, known: Iterable[str]) -> str:
    """The message for a routine that a library does not have."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, 1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return f"library {library!r} has no routine {name!r}{meant}; it has {', '.join(known)}"


WANTED = {
    MATRIX: "a dense matrix, and this one is sparse: A.fetch().toarray() is dense",
    SPARSE: "a sparse matrix on the gang: send one of SciPy with send_matrix",
}


def is_sparse(value: Any) -> bool:
    """Whether it is a sparse matrix, of SciPy or a handle of one."""
    return hasattr(value, "nnz")


class _Missing:
    def __repr__(self) -> str:
        return "<required>"


REQUIRED = _Missing()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a routine; `type` is one of `TYPES`."""

    name: str
    type: str
    default: Any = REQUIRED

    def __str__(self) -> str:
        text = f"{self.name}: {self.type}"
        return text if self.default is REQUIRED else f"{text} = {self.default!r}"


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a routine."""

    name: str
    type: str

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


def coerce(value: Any, kind: str) -> Any:
    """`value` as the plain Python value for a parameter of type `kind`.

    Accepts NumPy scalars and other exact conversions. Raises `TypeError` for a conversion that
    loses information (a float for an int).
    """
    if kind.startswith("list["):
        if kind == "list[string]" and isinstance(value, Mapping):  # options
            value = [f"{key}={given}" for key, given in value.items()]
        if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
            raise TypeError(type(value).__name__)
        if kind == "list[float]":  # often thousands: checked together
            if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind == "f":
                return value.astype(float).tolist()
            if set(map(type, value)) <= {float}:
                return list(value)
        return [coerce(item, kind[5:-1]) for item in value]
    if isinstance(value, int) and value not in _INT_RANGE and kind not in ("string", "bytes"):
        raise TypeError("an integer over 64 bits")
    match kind:
        case "bool" if isinstance(value, bool | np.bool_):
            return bool(value)
        case "int" if not isinstance(value, bool | np.bool_):
            try:
                number = operator.index(value)
            except TypeError:
                raise TypeError(type(value).__name__) from None
            if number not in _INT_RANGE:  # a NumPy uint64
                raise TypeError("an integer over 64 bits")
            return number
        case "float" if isinstance(value, int | float | np.integer | np.floating) and not (
            isinstance(value, bool)
        ):
            return float(value)
        case "complex" if isinstance(value, int | float | complex | np.number) and not (
            isinstance(value, bool)
        ):
            return complex(value)
        case "string" if isinstance(value, str):
            return str(value)
        case "bytes" if isinstance(value, bytes):
            return value
    raise TypeError(type(value).__name__)


def from_json(value: Any, kind: str) -> Any:
    """A value of JSON, which has no complex numbers: ``[1, -2]`` or ``"1-2j"`` for one."""
    if kind == "list[complex]" and isinstance(value, list):
        return [from_json(item, "complex") for item in value]
    if kind != "complex":
        return value
    try:
        if isinstance(value, list) and len(value) == 2:
            real, imaginary = (coerce(part, "float") for part in value)
            return complex(real, imaginary)
        return complex(value) if isinstance(value, str) else value
    except (TypeError, ValueError):
        return value  # `coerce` refuses it


@dataclass(frozen=True, slots=True)
class Signature:
    """A routine: name, parameters, results and documentation.

    `any_axes`: its matrix parameters take arrays of any number of axes; others at most two.
    """

    name: str
    parameters: tuple[Parameter, ...]
    results: tuple[Result, ...]
    doc: str = ""
    any_axes: bool = False

    def __str__(self) -> str:
        taken = ", ".join(map(str, self.parameters))
        given = ", ".join(map(str, self.results)) or "nothing"
        return f"{self.name}({taken}) -> {given}"

    def bind(
        self, args: Sequence[Any], kwargs: dict[str, Any], matrix: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """Arguments by name, checked, with defaults filled in.

        Parameters
        ----------
        args, kwargs
            The caller's arguments.
        matrix : callable
            Converts the argument of a matrix parameter. Raises `TypeError` if it is not a
            matrix.

        Raises
        ------
        Failure
            BadArgumentError; its message ends with the signature. ShapeError for an array with
            more axes than the routine takes.
        """
        names = [parameter.name for parameter in self.parameters]
        if len(args) > len(names):
            raise self._bad(
                f"takes {len(names)} argument{'s' * (len(names) != 1)}, not {len(args)}"
            )
        given = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names:
                raise self._bad(f"has no parameter {name!r}")
            if name in given:
                raise self._bad(f"got {name!r} twice")
            given[name] = value
        bound = {}
        for parameter in self.parameters:
            name, is_matrix = parameter.name, parameter.type in (MATRIX, SPARSE)
            value = given.get(name, parameter.default)
            if value is REQUIRED:
                raise self._bad(f"needs {name!r}")
            if value is parameter.default:
                bound[name] = value
                continue
            if is_matrix and value is not None and is_sparse(value) != (parameter.type == SPARSE):
                raise self._bad(f"requires {name!r} to be {WANTED[parameter.type]}")
            shape = getattr(value, "shape", ()) if is_matrix else ()
            if len(shape) > 2 and not self.any_axes:
                raise Failure(
                    "ShapeError",
                    f"{self.name}: {name} has the shape {tuple(shape)}, and this routine takes "
                    f"matrices: {name}.reshape(len({name}), -1) has a row for each of its parts",
                )
            try:
                bound[name] = matrix(value) if is_matrix else coerce(value, parameter.type)
            except TypeError as error:
                raise self._bad(
                    f"requires {name!r} to be of type {parameter.type}, not {error}"
                ) from None
        return bound

    def _bad(self, what: str) -> Failure:
        return Failure("BadArgumentError", f"{self.name} {what}. Its signature: {self}")

    def to_map(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "doc": self.doc,
            "parameters": [
                [p.name, p.type, *([] if p.default is REQUIRED else [p.default])]
                for p in self.parameters
            ],
            "results": [[r.name, r.type] for r in self.results],
            "any_axes": self.any_axes,
        }

    @classmethod
    def from_map(cls, fields: dict[str, Any]) -> Signature:
        return cls(
            fields["name"],
            tuple(Parameter(*entry) for entry in fields["parameters"]),
            tuple(Result(*entry) for entry in fields["results"]),
            fields["doc"],
            fields["any_axes"],
        )
