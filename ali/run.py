"""Runs a user's function, an existing mpi4py script or an MPI program on a rank.

The function and its arguments are pickles in the command, of a process that may run code here.
Inside the function, `context()` returns the `Context` that a routine of a library gets as its
first parameter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import io
import linecache
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from ali.executables.process import working_folder
from ali.interface import Context
from ali.sparse_matrices import on_ranks
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.sparse_matrix import SparseMatrix
from mpi_workers.matrix.sparse_rows import of_layout
from mpi_workers.protocol.packing import places

if TYPE_CHECKING:
    from mpi_workers.rank.gang_view import GangView

Find = Callable[[Any], DistMatrix]


_running: Context | None = None


def context() -> Context:
    """The context of the function or script that runs on this rank.

    Raises
    ------
    RuntimeError
        Outside of `AlchemistSession.run`, `run_script` and `mpi_function`.
    """
    if _running is None:
        raise RuntimeError(
            "ali.context() is only available in functions that als.run, run_script or mpi_function "
            "runs on a gang's ranks; a library's routine gets its Context as first parameter"
        )
    return _running


class Programs:
    """Runs functions, scripts and programs; keeps no state between them."""

    def run(
        self, gang: GangView, task: dict[str, Any], matrix: Find
    ) -> tuple[Sequence[DistMatrix], Any]:
        """Run a task; the matrices that it created, and rank 0's encoded result."""
        global _running
        _running = Context(gang, {})
        for part in ("code", "given"):
            if isinstance(large := task.get(part), dict):
                raw = matrix(large["matrix"]).local[:, 0].view(np.uint8)
                task[part] = [raw[place].data for place in places(large["sizes"])]
        try:
            match task["kind"]:
                case "script":
                    _run_script(_running, task, bytes(task["code"][0]))
                    result: Any = None
                case "program":
                    # Imported with ali, it would initialise MPI.
                    from ali.executables.program import run_program  # noqa: PLC0415

                    result = run_program(gang, task, matrix)
                case _:
                    result = _run_function(_running, task, matrix)
        finally:
            _running = None
        return _packed(result, task, gang.rank)


# --- functions --------------------------------------------------------------------------


def _run_function(ctx: Context, task: dict[str, Any], matrix: Find) -> Any:
    try:
        values = _load(task["values"], matrix, ()) if "values" in task else ()
        function = _load(task["code"], matrix, values)
        args, kwargs = _load(task["given"], matrix, values)
    except (Failure, Interrupted):
        raise
    except Exception as error:
        raise Failure(
            "RoutineError",
            f"{task['name']} or its arguments cannot be loaded on rank {ctx.rank}: "
            f"{type(error).__name__}: {error}. The modules that they import must be installed on "
            "the gang's nodes",
            rank=ctx.rank,
        ) from error
    return function(ctx.comm, *args, **kwargs)


class _Unpickler(pickle.Unpickler):
    """Replaces handles by matrices, and Ray's object refs by values."""

    def __init__(self, parts: Sequence[Any], matrix: Find, values: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(parts[0]), buffers=map(bytearray, parts[1:]))
        self._matrix = matrix
        self._values = values

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("cloudpickle.cloudpickle", "subimport"):
            return _later
        return super().find_class(module, name)

    def persistent_load(self, ident: tuple[str, Any]) -> Any:
        kind, which = ident
        if kind == "later":
            return _Later(*which)
        if kind != "matrix":
            return self._values[which]
        found = self._matrix(which)
        assert _running is not None
        return found if of_layout(found.layout) is None else on_ranks(_running.gang, found)


class _LaterModule(ModuleType):
    """A module that is imported when an attribute of it is used.

    A function that refers to a module of the user's brings all that this module has imported, such
    as Ray or a package for pictures, of which ranks need nothing.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(self.__name__), name, value)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self.__name__))


def _later(name: str) -> ModuleType:
    """A module. Raises `ImportError` if its package is not installed here."""
    if name in sys.modules:
        return importlib.import_module(name)
    if importlib.util.find_spec(top := name.partition(".")[0]) is None:
        raise ModuleNotFoundError(f"No module named {top!r}", name=top)
    return _LaterModule(name)


class _Later:
    """A class or function of the program's side, which is imported if it is used."""

    def __init__(self, module: str, name: str) -> None:
        self._where = module, name

    def _found(self) -> Any:
        return getattr(importlib.import_module(self._where[0]), self._where[1])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._found()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)


def _load(parts: Sequence[Any], matrix: Find, values: Sequence[Any]) -> Any:
    return _Unpickler(parts, matrix, values).load()


# --- results ----------------------------------------------------------------------------


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Replaces matrices by their index among the results; keeps large buffers out of band."""

    def __init__(self, file: io.BytesIO) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.matrices: list[DistMatrix] = []
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if isinstance(value, SparseMatrix):
            value = value.packed
        if not isinstance(value, DistMatrix):
            return None
        for index, known in enumerate(self.matrices):
            if known is value:
                return "matrix", index
        self.matrices.append(value)
        return "matrix", len(self.matrices) - 1


def _packed(result: Any, task: dict[str, Any], rank: int) -> tuple[Sequence[DistMatrix], Any]:
    """The matrices in a result, and the rest as a pickle."""
    file = io.BytesIO()
    pickler = _ResultPickler(file)
    try:
        pickler.dump(result)
    except Interrupted:
        raise
    except Exception as error:
        if rank != 0:  # only rank 0 returns values; other ranks return their parts of matrices
            return pickler.matrices, None
        raise Failure(
            "RoutineError",
            f"{task['name']} returned a value that cannot be pickled on rank {rank}: "
            f"{type(error).__name__}: {error}. Return NumPy arrays, matrices and plain values",
            rank=rank,
        ) from error
    parts = [file.getbuffer(), *(buffer.raw() for buffer in pickler.buffers)]
    return pickler.matrices, {"parts": parts} if rank == 0 else None


# --- scripts ----------------------------------------------------------------------------


def _run_script(ctx: Context, task: dict[str, Any], text: bytes) -> None:
    """Run a script's text as `__main__`, with its threads and `atexit` functions, to its end.

    Raises
    ------
    Failure
        RoutineError, if the exit code is not 0.
    """
    with _script_world(ctx, task) as main:
        try:
            lines = text.decode(errors="replace").splitlines(keepends=True)
            linecache.cache[task["path"]] = (len(text), None, lines, task["path"])  # tracebacks
            # Not inherited: this file's own __future__ statements.
            exec(compile(text, task["path"], "exec", dont_inherit=True), vars(main))
        except SystemExit as error:
            if error.code not in (None, 0):
                said = error.code if isinstance(error.code, int) else f"1: {error.code}"
                raise Failure(
                    "RoutineError",
                    f"{task['name']} exited with code {said} on rank {ctx.rank}",
                    rank=ctx.rank,
                    exit_code=error.code if isinstance(error.code, int) else 1,
                ) from None


@contextlib.contextmanager
def _script_world(ctx: Context, task: dict[str, Any]) -> Iterator[ModuleType]:
    """Set up a script's `__main__`, argv, path, folder, environment, MPI.COMM_WORLD.

    The ranks outlive the script: MPI stays initialised, and the modules of its folder are
    forgotten, because another script may have others of the same names. The rank's loop restores
    other settings of the process (`mpi_workers.rank.foreign_code`), also those of functions.
    """
    from mpi4py import MPI  # noqa: PLC0415  (imported with ali, it would initialise MPI)

    main = ModuleType("__main__")
    main.__file__ = task["path"]
    folder = os.path.dirname(task["path"])
    at_exit: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        at_exit.append((function, args, kwargs))
        return function

    def unregister(function: Callable[..., Any]) -> None:
        at_exit[:] = [entry for entry in at_exit if entry[0] != function]

    with contextlib.ExitStack() as put_back:
        if (cwd := working_folder(task, ctx.rank)) is not None:
            os.chdir(cwd)
        before = dict(os.environ)
        put_back.callback(os.environ.update, before)
        put_back.callback(os.environ.clear)  # runs first: callbacks run in reverse order
        os.environ.update(task["env"])
        for owner, name, value in (
            (sys, "argv", [task["path"], *task["argv"]]),
            (sys, "path", [folder, *sys.path] if os.path.isdir(folder) else list(sys.path)),
            (MPI, "COMM_WORLD", ctx.comm),
            (MPI, "Init", lambda: None),
            (MPI, "Init_thread", lambda required=MPI.THREAD_MULTIPLE: MPI.Query_thread()),
            (MPI, "Finalize", lambda: None),
            (atexit, "register", register),
            (atexit, "unregister", unregister),
        ):
            put_back.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        put_back.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        sys.modules["__main__"] = main
        put_back.callback(_forget_modules, folder, set(sys.modules))
        threads = threading.enumerate()
        try:
            yield main
        finally:
            if not (isinstance(sys.exception(), Interrupted) or ctx.gang.left_in()):
                _join_threads(threads)
            while at_exit:
                function, args, kwargs = at_exit.pop()
                try:
                    function(*args, **kwargs)
                except Interrupted:
                    raise
                except BaseException as error:  # as Python, which goes on, and exits with 0
                    sys.stderr.write(f"Exception ignored in atexit callback: {function!r}\n")
                    with contextlib.suppress(Exception):  # of the error's own code
                        traceback.print_exception(error)


def _join_threads(known: Collection[threading.Thread]) -> None:
    """Wait for threads that a script has left, as Python does at the end of a program."""
    while left := {t for t in threading.enumerate() if t not in known and not t.daemon}:
        for pool in gc.get_objects():
            if issubclass(type(pool), ThreadPoolExecutor) and pool._threads & left:
                pool.shutdown(wait=False)  # its idle threads would wait for work
        left.pop().join()


def _forget_modules(folder: str, kept: set[str]) -> None:
    """Forget the Python modules and packages that were found in this folder, except `kept`."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in kept or "." in name or not file or not file.endswith(".py"):
            continue
        if os.path.dirname(file) in (folder, os.path.join(folder, name)):
            for inner in [each for each in sys.modules if each.partition(".")[0] == name]:
                del sys.modules[inner]
