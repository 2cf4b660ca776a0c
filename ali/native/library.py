"""A shared object as a library: opens it, looks up its one symbol, calls its routines.

The interface is ``include/alchemist.h``.
"""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.interface import Context
from ali.loader import known_processor, provide_mpich
from ali.mpi_family import foreign_mpi, our_mpi, refuse_second_mpi
from ali.native.host import (
    ABI,
    ENDED,
    OK,
    READ,
    SYMBOL,
    TYPES,
    WRITTEN,
    CCall,
    CLibrary,
    CValue,
    Frame,
    Host,
    ignored_errors_raised,
    text_of,
)
from ali.python_library import check_state_routines, no_such_routine
from ali.sparse_matrices import arguments_of
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.protocol.signature import (
    REQUIRED,
    Parameter,
    Result,
    Signature,
    coerce,
    from_json,
)

if TYPE_CHECKING:
    from mpi_workers.rank.gang_view import GangView


class NativeLibrary:
    """A shared object's routines, as the rank's loop calls them.

    Parameters
    ----------
    name : str
        The name that the session loaded it as.
    path : Path
        The shared object.

    Raises
    ------
    Failure
        LibraryNotFoundError, if the file does not exist; LibraryLoadError, if the loader cannot
        open it (with the loader's message), or it exports no ``alchemist_library_describe``, has
        another ABI version, is linked to another MPI, or has an invalid declaration.

    Notes
    -----
    The object stays mapped until the rank ends, because its own threads may run in it. A rebuilt
    file is a different file to the loader, and is opened at the next load.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._state: int | None = None
        self.host = Host()
        try:
            self._file = _OpenedFile.of(path)
        except OSError as error:
            raise self._bad(f"the loader cannot open it: {error}") from None
        self._check_file()
        self._object = _open(name, self._file)
        self._library = self._look_up(path)
        self._routines: dict[str, tuple[Any, Signature]] = {}
        self._writes: dict[str, list[str] | None] = {}  # matrices that are changed, if declared
        for routine in _until_null(self._library.routines):
            signature = self._signature(routine)
            if signature.name in self._routines:
                raise self._bad(f"it declares routine {signature.name!r} twice")
            self._routines[signature.name] = (routine, signature)
        if not self._routines:
            raise self._bad("it declares no routine")
        self.signatures = {key: its for key, (_, its) in self._routines.items()}
        check_state_routines(name, self.signatures)

    def _look_up(self, path: Path) -> Any:
        try:
            entry = getattr(self._object, SYMBOL)
        except AttributeError as error:
            raise self._bad(
                f"{error}. A library must export that symbol: use the macro "
                "ALCHEMIST_LIBRARY(...) of alchemist.h"
            ) from None
        entry.restype = ctypes.c_void_p
        where = entry()
        if not where:
            raise self._bad(f"{SYMBOL}() returned NULL")
        abi = ctypes.c_int32.from_address(where).value
        if abi != ABI:
            raise self._bad(
                f"{path} was built for ABI version {abi}; this is version {ABI}: rebuild it "
                f"with the alchemist.h in {Path(__file__).parents[1] / 'include'}"
            )
        return CLibrary.from_address(where)

    def _check_file(self) -> None:
        """Refuse code that is no longer what the loader has mapped: it would crash."""
        if self._file.overwritten:
            raise self._bad(
                f"{self._file.path} was written to after it was loaded, which spoils its code in "
                "memory. Start another gang, and replace the file next time: `mv` and linkers do, "
                "`cp` writes into it (cp --remove-destination does not)"
            )

    def _bad(self, words: str) -> Failure:
        return Failure("LibraryLoadError", f"library {self._name!r}: {words}")

    def _signature(self, routine: Any) -> Signature:
        name = text_of(routine.name)
        if not name.isidentifier():
            raise self._bad(f"{name!r} cannot be the name of a routine")
        if not routine.run:
            raise self._bad(f"routine {name!r} has no function")
        parameters, results, lines = [], [], []
        changes: dict[str, int] = {}  # by matrix parameter: its type
        for p in _until_null(routine.parameters):
            kind = 1 if p.type in (READ, WRITTEN) else p.type
            about = self._declared(name, p.name, kind)
            if kind == 1:
                changes[about[0]] = p.type
            default = self._default(name, about, p.default_value)
            parameters.append(Parameter(*about, default))
            lines.append(f"{about[0]} : {about[1]}\n    {text_of(p.doc)}")
        declared = changes and 1 not in changes.values()
        written = [matrix for matrix, kind in changes.items() if kind == WRITTEN]
        if written and not declared:
            raise self._bad(
                f"routine {name!r} declares changes of {', '.join(written)}: declare its other "
                "matrices too, ALCHEMIST_MATRIX_READ or ALCHEMIST_MATRIX_WRITTEN"
            )
        self._writes[name] = written if declared else None
        taken = lines
        lines = []
        for r in _until_null(routine.results):
            about = self._declared(name, r.name, r.type)
            results.append(Result(*about))
            lines.append(f"{about[0]} : {about[1]}\n    {text_of(r.doc)}")
        names = [p.name for p in parameters]
        if len(set(names)) < len(names):
            raise self._bad(f"routine {name!r} repeats the name of a parameter: {', '.join(names)}")
        doc = text_of(routine.doc).strip()
        for title, entries in (("Parameters", taken), ("Returns", lines)):
            if entries:
                doc += f"\n\n{title}\n{'-' * len(title)}\n" + "\n".join(entries)
        return Signature(name, tuple(parameters), tuple(results), doc)

    def _declared(self, routine: str, name: bytes, kind: int) -> tuple[str, str]:
        if not text_of(name).isidentifier():
            raise self._bad(
                f"routine {routine!r} has a parameter or result named {text_of(name)!r}: declare "
                "one name, an identifier, for each parameter and result of the function"
            )
        if not 1 <= kind <= len(TYPES):
            raise self._bad(f"{routine}: {text_of(name)!r} has the unknown type {kind}")
        return text_of(name), TYPES[kind - 1]

    def _default(self, routine: str, about: tuple[str, str], raw: bytes | None) -> Any:
        if raw is None:
            return REQUIRED
        name, kind = about
        try:
            value = json.loads(raw)
            return None if value is None else coerce(from_json(value, kind), kind)
        except (ValueError, TypeError):
            raise self._bad(
                f"{routine}: the default of {name!r}, {text_of(raw)!r}, is not JSON for type {kind}"
            ) from None

    def describe(self) -> dict[str, Any]:
        """Name, documentation and signatures, as a map."""
        return {
            "name": self._name,
            "doc": text_of(self._library.doc),
            "routines": [
                {**signature.to_map(), "writes": self._writes[name]}
                for name, (_, signature) in self._routines.items()
            ],
        }

    def call(self, gang: GangView, routine: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Run a routine on this rank; one value per declared result.

        Raises
        ------
        Failure
            NoSuchRoutineError; RoutineError or BadArgumentError, with the library's message.
        Interrupted
            If the call has failed on another rank or was cancelled, and the routine noticed.
        """
        native, signature = self.routine(routine)
        frame = Frame(Context(gang, {}))
        arguments = arguments_of(gang, signature, arguments)
        values = []
        for parameter in signature.parameters:
            try:
                values.append(frame.store(arguments[parameter.name], parameter.type))
            except Failure as failure:
                what = f"{self._name}.{routine}: its argument {parameter.name!r} {failure.message}"
                raise Failure(failure.kind, what) from None
        given = (CValue * max(1, len(values)))(*values)
        results = (CValue * max(1, len(signature.results)))()
        call = CCall(
            self.host.address,
            MPI._handleof(gang.comm),
            gang.rank,
            gang.size,
            *gang.grid,
            None,
        )
        self.enter(native.run, call, given, results, routine, frame)
        found = []
        for value, result in zip(results, signature.results, strict=False):
            try:
                found.append(frame.load(value, result.type))
            except Failure as failure:
                raise Failure(
                    "RoutineError",
                    f"{self._name}.{routine} on rank {gang.rank}: its result {result.name!r} "
                    f"{failure.message}",
                ) from None
        return found

    def routine(self, name: str) -> tuple[Any, Signature]:
        """A routine in C, and its signature. Raises `Failure`."""
        if name not in self._routines:
            raise no_such_routine(self._name, name, self._routines)
        return self._routines[name]

    def prepared(self, gang: GangView, routine: str) -> PreparedCall:
        """A routine of numbers, to be called often."""
        return PreparedCall(self, gang, routine)

    def enter(
        self, run: Any, call: Any, given: Any, results: Any, routine: str, frame: Frame
    ) -> None:
        """Call C with the library's state. Raises as `call`."""
        self._check_file()
        call.state = self._state
        self.host.frame = frame
        with ignored_errors_raised(frame.context.gang, f"{self._name}.{routine}"):
            try:
                code = run(ctypes.byref(call), given, results)
            finally:
                self.host.frame = None
                self._state = call.state
                while frame.spans:  # that the routine has not ended
                    frame.spans.pop().__exit__(None)
            if code != OK or frame.failure is not None:
                self._judge(routine, code, frame, call.rank)

    def _judge(self, routine: str, code: int, frame: Frame, rank: int) -> None:
        what = f"{self._name}.{routine}"
        # Whatever the library says then, the cause is on another rank.
        if code == ENDED or frame.ended or isinstance(frame.failure, Interrupted):
            interrupted = Interrupted()
            interrupted.place = what
            raise interrupted
        if frame.message is not None and frame.refused:
            raise Failure("BadArgumentError", f"{what}: {frame.message}")
        what = f"{what} failed on rank {rank}"
        if frame.message is not None:
            raise Failure("RoutineError", f"{what}: {frame.message}")
        if isinstance(frame.failure, Failure | MemoryError):
            raise frame.failure
        if frame.failure is not None:
            trace = "".join(traceback.format_exception(frame.failure))
            raise Failure("RoutineError", f"{what}: {frame.failure}", traceback=trace)
        raise Failure("RoutineError", f"{what}: it returned {code} without a message")

    def close(self) -> None:
        """Call the library's close function with its state."""
        state, self._state = self._state, None
        if state and self._library.close and not self._file.overwritten:
            self._library.close(state)


def _until_null(array: Any) -> list[Any]:
    """The entries of a C array before the one whose name is NULL."""
    found: list[Any] = []
    while array and array[len(found)].name is not None:
        found.append(array[len(found)])
    return found


_opened: dict[Path, list[_OpenedFile]] = {}  # those that were opened at each path, in order


@dataclass(frozen=True, eq=False)
class _OpenedFile:
    """A file that the loader maps until the rank ends: its inode cannot be another file's."""

    path: Path
    fd: int
    written_ns: int

    @classmethod
    def of(cls, path: Path) -> _OpenedFile:
        """The file that is at this path now."""
        path = path.resolve()
        known = _opened.setdefault(path, [])
        for one in known:
            if os.path.samestat(os.fstat(one.fd), path.stat()):
                return one
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        known.append(cls(path, fd, os.fstat(fd).st_mtime_ns))
        return known[-1]

    @property
    def overwritten(self) -> bool:
        """Whether it was written to; a file that is replaced stays as it is."""
        return os.fstat(self.fd).st_mtime_ns != self.written_ns


def _open(name: str, file: _OpenedFile) -> ctypes.CDLL:
    """Open a shared object; also a rebuilt file at the path of an older one."""
    path = file.path
    if needed := foreign_mpi(path):
        raise Failure(
            "LibraryLoadError",
            f"library {name!r}: {path} is linked to {needed}, but this gang runs on {our_mpi()}: "
            "build it, and the libraries that it needs, with the gang's mpicc (`python -m ali "
            "mpicc`)",
        )
    provide_mpich()
    # The loader identifies objects by requested path: a rebuilt file needs another spelling.
    spelling = f"{path.parent}/{'./' * _opened[path].index(file)}{path.name}"
    try:
        with known_processor():
            opened = ctypes.CDLL(spelling, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise Failure(
            "LibraryLoadError",
            f"library {name!r}: the loader cannot open it: {error}. The libraries that it needs "
            "must be linked to it (-l..., -Wl,-rpath,...) and installed on every node",
        ) from None
    refuse_second_mpi(name, path)
    return opened


NOTHING = np.zeros(0)


class PreparedCall:
    """Calls a routine whose parameter is a list of floats or none, and its result a list, a bool
    or none.

    Structures are reused between calls and numbers are not converted to Python objects: a call
    costs a few microseconds.

    Parameters
    ----------
    library : NativeLibrary
    gang : GangView
        The ranks that run it.
    routine : str

    Raises
    ------
    Failure
        NoSuchRoutineError.
    """

    def __init__(self, library: NativeLibrary, gang: GangView, routine: str) -> None:
        self._library = library
        self._gang = gang
        self._routine = routine
        native, signature = library.routine(routine)
        self._run = native.run  # kept: each access to the struct creates an object
        self._flag = [r.type for r in signature.results] == ["bool"]
        self._given = CValue(given=1)
        self._found = CValue()
        self._call = CCall(library.host.address, 0, gang.rank, gang.size, *gang.grid, None)
        self._comm: object = None
        self._context = Context(gang, {})
        self._frame: Frame | None = None
        self._where: tuple[int, int | None] = (0, None)
        self._view = NOTHING

    def __call__(self, numbers: NDArray[np.float64] | None = None) -> int:
        """Run it with `numbers` (contiguous).

        Returns the count of returned numbers, or 0 or 1 for a bool. Only rank 0 of the
        communicator must return a list. Raises as `NativeLibrary.call`.
        """
        self._frame = self._called(numbers)
        return int(self._found.flag != 0) if self._flag else int(self._found.count)

    def numbers(self) -> NDArray[np.float64]:
        """Run it without arguments; its result, in memory of the library, until the next call."""
        self._frame = self._called(None)  # has the library's allocations
        found = self._found
        where = found.count, found.numbers
        if where != self._where:
            self._where = where
            self._view = NOTHING
            if found.count and found.numbers:
                memory = (ctypes.c_double * found.count).from_address(found.numbers)
                self._view = np.frombuffer(memory)
        return self._view

    def _called(self, numbers: NDArray[np.float64] | None) -> Frame:
        call = self._call
        if self._gang.comm is not self._comm:
            self._comm = self._gang.comm
            call.comm = MPI._handleof(self._gang.comm)
        if numbers is not None:
            self._given.count, self._given.numbers = len(numbers), numbers.ctypes.data
        found = self._found
        found.count, found.numbers = 0, None
        frame = Frame(self._context)
        self._library.enter(self._run, call, self._given, found, self._routine, frame)
        return frame
