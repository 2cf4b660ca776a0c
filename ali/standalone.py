"""``alchemist run-routine``: one routine of a library on MPI ranks, without Ray.

For sanitizers and profilers: each rank is a process of mpiexec, and may be started under
a command.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ali import registry
from ali.interface import Context
from ali.python_library import no_such_routine
from mpi_workers.failures import Failure
from mpi_workers.local import local_gang
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import chosen_dtype
from mpi_workers.matrix.layout import check_layout
from mpi_workers.protocol.signature import from_json

if TYPE_CHECKING:
    from mpi_workers.rank.gang_view import GangView

LIMIT_S = 24 * 3600.0  # a debugger may wait for its user
SHOWN = 1000  # elements of a result that are printed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("library", help="a .py file, a shared object, or the name of a library")
    parser.add_argument("routine")
    parser.add_argument(
        "arguments",
        nargs="*",
        help="in the order of the signature, or name=value: a .npy file for a matrix, else JSON "
        "(a word that is not JSON is a string)",
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument(
        "--layout", default="VC_STAR", type=_layout, help="layout of matrices (default: VC_STAR)"
    )
    parser.add_argument(
        "--under",
        default="",
        metavar="COMMAND",
        help='a command that starts each rank, e.g. "env ASAN_OPTIONS=detect_leaks=0"',
    )
    parser.add_argument(
        "--out", type=Path, help="save matrices of the result, and changed ones, there as .npy"
    )
    parser.add_argument(
        "--timeout", type=float, default=LIMIT_S, help="seconds after which stacks are printed"
    )


def run(options: argparse.Namespace) -> None:
    """Run the command. Raises `RuntimeError` if a rank has failed; it has printed its error."""
    file = Path(options.library)
    is_file = bool(file.suffix) or file.is_file()
    if options.ranks < 1:
        raise ValueError(f"--ranks {options.ranks}: it must be at least 1")
    if not 0 < options.timeout < math.inf:
        raise ValueError(f"--timeout {options.timeout}: it must be a finite number greater than 0")
    spec = {
        "library": file.name.split(".")[0] if is_file else options.library,
        "path": str(file.absolute()) if is_file else None,
        "routine": options.routine,
        "layout": options.layout,
        "out": None if options.out is None else str(options.out.absolute()),
        "arguments": [_argument(word) for word in options.arguments],
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _end)
    try:
        local_gang.run(
            "ali.standalone:on_rank",
            options.ranks,
            json.dumps(spec),
            timeout=options.timeout,
            under=shlex.split(options.under),
        )
    except AssertionError:
        raise RuntimeError("a rank has failed: its error is printed above") from None


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)  # an exception: the ranks are killed on its way


def _argument(word: str) -> list[Any]:
    """Name (or None), whether it is the file of a matrix, and the path or value."""
    name, equals, rest = word.partition("=")
    if not (equals and name.isidentifier()):
        name, rest = "", word
    if rest.endswith(".npy"):
        if not Path(rest).is_file():
            raise ValueError(f"there is no file {rest}")
        return [name or None, True, os.path.abspath(rest)]
    try:
        return [name or None, False, json.loads(rest)]
    except ValueError:
        return [name or None, False, rest]


# --- on the ranks -----------------------------------------------------------------------


def on_rank(gang: GangView, text: str) -> None:
    """Call the routine and print its results. An error ends this rank, and mpiexec the others."""
    spec = json.loads(text)
    try:
        library = registry.load(spec["library"], spec["path"])
        if spec["routine"] not in library.signatures:
            raise no_such_routine(spec["library"], spec["routine"], library.signatures)
        signature = library.signatures[spec["routine"]]
        given = [(name, Path(v) if file else v) for name, file, v in spec["arguments"]]
        kinds = {parameter.name: parameter.type for parameter in signature.parameters}
        words = [value for name, value in given if name is None]
        typed = [from_json(word, kind) for word, kind in zip(words, kinds.values(), strict=False)]
        arguments = signature.bind(
            typed + words[len(typed) :],
            {name: from_json(v, kinds.get(name, "")) for name, v in given if name is not None},
            lambda value: _loaded(gang, value, spec["layout"]),
        )
        values = library.call(gang, spec["routine"], arguments)
    except Failure as failure:
        sys.stdout.flush()
        sys.stderr.write(f"rank {gang.rank}: {failure.kind}: {failure.message}\n")
        sys.stderr.flush()
        os._exit(1)
    for result, value in zip(signature.results, values, strict=True):
        _show(gang, result.name, value, spec["out"])
    writes = {about["name"]: about.get("writes") or () for about in library.describe()["routines"]}
    for name in writes[spec["routine"]]:  # results, too
        if arguments[name] is not None:
            _show(gang, name, arguments[name], spec["out"])


def _layout(name: str) -> str:
    try:
        return check_layout(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _loaded(gang: GangView, value: Any, layout: str) -> DistMatrix:
    if not isinstance(value, Path):  # of a .npy file
        raise TypeError(f"{value!r}; give a .npy file")
    try:
        array: NDArray[Any] = np.load(value, mmap_mode="r")
        array = array.astype(chosen_dtype(array.dtype), copy=False)
    except (ValueError, EOFError, OSError) as error:
        raise Failure("BadArgumentError", f"{value}: {error}") from None
    return Context(gang, {}).new_replicated(array, layout)


def _show(gang: GangView, name: str, value: Any, out: str | None) -> None:
    if not isinstance(value, DistMatrix):
        if gang.rank == 0:
            sys.stdout.write(f"{name} = {value!r}\n")
        return
    whole = gang.to_layout(value, "STAR_STAR").local.reshape(value.array_shape, order="F")
    if gang.rank != 0:
        return
    sys.stdout.write(f"{name}: {value.dtype} {value.array_shape}, {value.layout}\n")
    if whole.size <= SHOWN:
        sys.stdout.write(f"{whole}\n")
    if out is not None:
        np.save(Path(out, f"{name}.npy"), whole)
