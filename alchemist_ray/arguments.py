"""Checks of arguments. An error names the argument, the values that are allowed, and its value."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from alchemist_ray.errors import BadArgumentError, MatrixError, ResourceError, SessionError

MAX_PORT = 65535
MAX_SECONDS = 1e9  # 30 years; locks and timers overflow beyond 300

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def near(name: object, known: Iterable[str]) -> str:
    """``" (did you mean 'num_workers'?)"``, or nothing if no known name is similar."""
    found = difflib.get_close_matches(str(name), list(known), 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def known_options(owner: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that unknown keywords are refused with the nearest known one.

    Parameters
    ----------
    owner : str
        The name that users call it by.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind in keywords and p.name not in ("self", "cls")]

        @functools.wraps(function)
        def called(*args: P.args, **options: P.kwargs) -> R:
            for name in options:
                if name not in known:
                    raise TypeError(
                        f"{owner} has no option {name!r}{near(name, known)}. Options: "
                        + ", ".join(known)
                    )
            return function(*args, **options)

        return called

    return decorated


def named_after(owner: type[T]) -> type[T]:
    """Decorate a class: Python's errors name it, not the base class that defines a method."""
    package = owner.__module__.partition(".")[0]
    for base in owner.__mro__[1:]:
        if base.__module__.partition(".")[0] != package:
            continue
        for name, member in vars(base).items():
            function = getattr(member, "__func__", member)
            while inspect.isfunction(function):
                function.__qualname__ = f"{owner.__qualname__}.{name}"
                function = getattr(function, "__wrapped__", None)
    return owner


def positive_int(
    name: str, value: Any, kind: type[Exception] = ValueError, *, least: int = 1
) -> None:
    """A whole number. Raises `ResourceError` for a number of workers, else `kind`."""
    number = None if isinstance(value, bool) else value
    try:
        valid = number is not None and number.__index__() >= least
    except (AttributeError, TypeError):
        valid = False
    if not valid:
        kind = ResourceError if name == "num_workers" else kind
        raise kind(f"{name}={value!r}: it must be a whole number, at least {least}")


def checked_seconds(
    name: str, value: Any, kind: type[Exception] = ValueError, *, most: float = math.inf
) -> float:
    """A number of seconds greater than 0. Raises `kind`."""
    if not _is_number(value) or not 0 < value <= most:
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise kind(f"{name}={value!r}: it must be a number of seconds greater than 0{limit}")
    return float(value)


def checked_cpus(name: str, value: Any, kind: type[Exception] = ValueError) -> float:
    """A number of CPUs greater than 0. Raises `kind`."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise kind(f"{name}={value!r}: it must be a finite number greater than 0")
    return float(value)


def checked_gpus(name: str, value: Any, kind: type[Exception] = ValueError) -> float:
    """A whole number of GPUs, or a part of one, as Ray takes it. Raises `kind`."""
    if not _is_number(value) or not (0 <= value < 1 or value in range(1, 1 << 16)):
        raise kind(f"{name}={value!r}: it must be a fraction below 1, or a whole number")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def checked_address(host: Any, port: Any, least: int = 1) -> None:
    """A host name or IP address, and a port. Raises `SessionError`."""
    number = isinstance(port, int) and not isinstance(port, bool)
    if not isinstance(host, str) or not host or not number or not least <= port <= MAX_PORT:
        raise SessionError(
            f"address={host!r}, port={port!r}: they must be a host name or IP address, and a port "
            f"from {least} to {MAX_PORT}"
        )


def checked_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """One of some words. Raises `ValueError`."""
    if value not in (known := list(choices)):
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def checked_flag(name: str, value: Any, *, optional: bool = False) -> None:
    """True or False, or None where it is optional. Raises `ValueError`."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise ValueError(f"{name}={value!r}: it must be True{', None' * optional} or False")


def checked_path(name: str, value: Any, kind: type[Exception] = BadArgumentError) -> Path:
    """An absolute path, with the home folder for ``~``. Raises `kind`."""
    try:
        path = Path(value).expanduser()
    except (TypeError, RuntimeError):  # "~nobody": no such user
        raise kind(f"{name}={value!r}: it must be a path on this machine") from None
    if not str(value):
        raise kind(f"{name}='': it must be a path")
    return path.absolute()


def checked_mapping(name: str, value: Any, contents: str) -> Mapping[Any, Any]:
    """A mapping; None is an empty one. Raises `BadArgumentError`."""
    if value is not None and not isinstance(value, Mapping):
        raise BadArgumentError(f"{name}={value!r}: it must be a dict of {contents}")
    return value or {}


# Variables that a rank cannot have from `env=`, by prefix: why, and what to do instead.
_BY_LAUNCHER = "the launcher of the ranks sets it"
_AT_START = "it is read before `env` is set: set it where Ray starts on the nodes"
REFUSED_VARIABLES = {
    "PMI": _BY_LAUNCHER, "HYDI": _BY_LAUNCHER, "SLURM_": _BY_LAUNCHER, "PALS_": _BY_LAUNCHER,
    "LD_": f"{_AT_START} (`LD_LIBRARY_PATH=... ray start`), or use run_program(env=)",
    "MPI4PY_": _AT_START,
    "PYTHON": f"{_AT_START}; a function can change sys.path",
    "PATH": "it begins with the programs of the ranks' MPI and goes on as where Ray was started: "
    "set it there, or use run_program(env=)",
    "ALCHEMIST_": "it belongs to this package, whose settings are options (launcher=, ...), or "
    "variables where Ray starts",
}  # fmt: skip
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def checked_env(value: Any, kind: type[Exception] = ValueError) -> dict[str, str]:
    """Environment variables for ranks, as strings. Raises `kind`."""
    if value is not None and not isinstance(value, Mapping):
        raise kind(f"env={value!r}: it must be a dict of names and values of variables")
    env = {}
    for name, given in (value or {}).items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise kind(f"env: {name!r} is not the name of an environment variable")
        for prefix, why in REFUSED_VARIABLES.items():
            if name == prefix or (prefix != "PATH" and name.startswith(prefix)):
                raise kind(f"env: ranks cannot be given {name}: {why}")
        if not isinstance(given, str | int | float) or "\0" in (text := str(given)):
            raise kind(f"env[{name!r}]={given!r}: it must be a string or a number")
        if name in THREAD_VARIABLES and not text.isdecimal():
            raise kind(f"env[{name!r}]={given!r}: it must be a number of threads")
        env[name] = text
    return env


def checked_matrix_name(name: Any) -> None:
    """A name for a matrix, or None. Raises `MatrixError`."""
    if name is not None and (not isinstance(name, str) or not name or not name.isprintable()):
        raise MatrixError(
            f"name={name!r}: the name of a matrix must be a string of printable characters"
        )
