"""The page docs/arrays-coverage.md, made of the cases that tests compare with NumPy.

``python -m tests.alchemist_ray.arrays.coverage`` writes it. Every case of `cases.py` is called with
arrays that record which functions of NumPy are called, with which parameters and dtypes.
"""

from __future__ import annotations

import contextlib
import inspect
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alchemist_ray.arrays.rules import FUNCTIONS, INSTEAD
from alchemist_ray.arrays.ufuncs import INSTEAD_OF_METHODS
from mpi_workers.matrix.dtypes import DTYPES
from tests.alchemist_ray.arrays import cases
from tests.alchemist_ray.arrays.checks import REFUSALS, elements, values

PAGE = Path(__file__).parents[3] / "docs" / "arrays-coverage.md"
SHAPES = [(6, 4), (7,)]


class Recorder(np.ndarray[Any, Any]):
    """An array that notes the functions of NumPy that it is given to."""

    seen: dict[Any, set[str]]
    called: set[Any]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        found = function(*_plain(args), **_plain(kwargs))
        try:
            given = set(inspect.signature(function).bind(*args, **kwargs).arguments)
        except ValueError:  # some functions of NumPy have no signature
            given = set(kwargs)
        required = _required(function)
        Recorder.seen[function] |= given - required
        Recorder.called.add(function)
        return _recording(found)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        found = getattr(ufunc, method)(*_plain(args), **_plain(kwargs))
        Recorder.seen[ufunc] |= set()
        Recorder.called.add(ufunc)
        return _recording(found)


def _required(function: Any) -> set[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return set()
    return {p.name for p in parameters if p.default is p.empty}


def _plain(value: Any) -> Any:
    if isinstance(value, Recorder):
        return value.view(np.ndarray)
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def _recording(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_recording, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_recording, value))
    return value.view(Recorder) if isinstance(value, np.ndarray) else value


def _calls() -> Iterator[tuple[Any, Any]]:
    """Each case with a function that makes its arguments of a dtype."""
    for shape in SHAPES:
        for name in (*cases.ALONG, *cases.METHODS):
            for axis in (None, 0):
                keeping = name in (*cases.KEEPING, *cases.METHODS)
                options = {"axis": axis, **({"keepdims": True} if keeping else {})}
                yield _named(name, options), lambda dtype, shape=shape: (elements(shape, dtype),)
        for work in cases.OTHERS.values():
            yield work, lambda dtype, shape=shape: (elements(shape, dtype),)
    for work in cases.PAIRS:
        yield work, lambda dtype: (values((6, 6), dtype), values((3, 6), "float64", 1))
    for work in cases.LINEAR:
        yield work, lambda dtype: ((np.eye(5) * 3 + 1).astype(dtype),)
    for work in cases.ASKING:
        yield work, lambda dtype: (values((6, 5), dtype),)
    for ufunc in cases.UFUNCS:
        yield ufunc, lambda dtype: (values((6, 5), dtype),)
    for name in sorted(cases.BINARY_UFUNCS):
        yield getattr(np, name), lambda dtype: (values((6, 5), dtype), values((1, 5), dtype, 1))


def _named(name: str, options: dict[str, Any]) -> Any:
    return lambda x: getattr(np, name)(x, **options)


def recorded() -> dict[Any, tuple[set[str], list[str]]]:
    """Of each function that a case calls: optional parameters, and dtypes that NumPy takes."""
    dtypes: dict[Any, set[str]] = defaultdict(set)
    Recorder.seen = defaultdict(set)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for work, arguments in _calls():
            for dtype in DTYPES:
                Recorder.called = set()
                with contextlib.suppress(REFUSALS):  # functions before it have been called
                    work(*_recording(arguments(dtype)))
                for function in Recorder.called:
                    dtypes[function].add(dtype)
    return {
        function: (given, [dtype for dtype in DTYPES if dtype in dtypes[function]])
        for function, given in Recorder.seen.items()
    }


def name_of(function: Any) -> str:
    module = "np" if isinstance(function, np.ufunc) else function.__module__
    return f"{module.replace('numpy', 'np')}.{function.__name__}"


def absent() -> list[Any]:
    """NumPy's functions that ask their arguments for an implementation, and handles have none."""
    kinds = type(np.sum), np.ufunc
    given = {f for module in (np, np.linalg, np.fft) for f in vars(module).values()
             if isinstance(f, kinds)}  # fmt: skip
    compared = recorded()
    return [f for f in given if f not in compared and f not in FUNCTIONS]  # can_cast takes dtypes


def page() -> str:
    """The page, as Markdown."""
    rows = []
    for function, (given, dtypes) in sorted(recorded().items(), key=lambda item: name_of(item[0])):
        missing = [dtype for dtype in DTYPES if dtype not in dtypes]
        which = ", ".join(dtypes)
        if len(missing) < len(dtypes):
            which = f"all but {', '.join(missing)}" if missing else "all"
        told = ", ".join(f"`{one}`" for one in sorted(given))
        rows.append(f"| `{name_of(function)}` | {told} | {which} |")
    lacking = sorted(absent(), key=name_of)
    instead = [
        f"| `{name_of(f)}` | {_code(INSTEAD[f.__name__])} |"
        for f in lacking
        if f.__name__ in INSTEAD
    ]
    instead += [
        f"| `ufunc.{name}` | {advice} |" for name, advice in sorted(INSTEAD_OF_METHODS.items())
    ]
    fetching = ", ".join(f"`{name_of(f)}`" for f in lacking if f.__name__ not in INSTEAD)
    refused = [f"- `{code}`" for code in sorted(cases.REFUSED)]
    return "\n".join([
        "# Coverage of NumPy's functions",
        "",
        "`python -m tests.alchemist_ray.arrays.coverage` makes this page of the cases that",
        "`tests/alchemist_ray/arrays` compares with NumPy in values, shapes and dtypes.",
        "",
        "## Functions",
        "",
        "Parameters are the optional ones that are compared. Dtypes are those of the array; NumPy",
        "refuses the others, and so do handles.",
        "",
        "| function | parameters | dtypes |",
        "|---|---|---|",
        *rows,
        "",
        "## Functions that are missing",
        "",
        "The error names this code, which a test runs.",
        "",
        "| function | instead |",
        "|---|---|",
        *instead,
        "",
        "The others take what `A.fetch()` gives, and the error says so:",
        textwrap.fill(f"{fetching}.", 100, break_on_hyphens=False),
        "",
        "## Forms that are refused",
        "",
        "The error names what to do.",
        "",
        *refused,
        "",
    ])  # fmt: skip


def _code(advice: str) -> str:
    for mark in (", a ", " for "):
        if mark in advice:
            code, rest = advice.split(mark, 1)
            return f"`{code}`{mark}{rest}"
    return f"`{advice}`"


if __name__ == "__main__":
    PAGE.write_text(page())
