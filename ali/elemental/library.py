"""libEl: its file, checks that it fits this process, and its C functions.

Elemental is not part of this project: it is found at run time, and an unsuitable libEl is reported
when the library is loaded, not by the first routine that needs it.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_bool, c_double, c_float, c_int, c_longlong, c_void_p
from pathlib import Path
from typing import Any

from mpi4py import MPI

from ali.elemental.controls import control
from ali.elemental.error_messages import ErrorMessages
from ali.loader import known_processor, provide_mpich, symbol_file
from mpi_workers.failures import Failure

VARIABLE = "ELEMENTAL_LIB"
NAME = "libEl.so"
HOW = (
    "Elemental is not shipped with Alchemist: build it as a shared library against the MPICH "
    f"that the gang uses, and name its {NAME} in load_library('elemental', path) or in "
    f"{VARIABLE} on every node before Ray starts there"
)
LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
CODES = {
    1: "EL_ALLOC_ERROR",
    2: "EL_OUT_OF_BOUNDS_ERROR",
    3: "EL_ARG_ERROR",
    4: "EL_LOGIC_ERROR",
    5: "EL_RUNTIME_ERROR",
    -1: "EL_ERROR",
}


class _ComplexFloat(ctypes.Structure):
    _fields_ = [("real", c_float), ("imag", c_float)]


class _ComplexDouble(ctypes.Structure):
    _fields_ = [("real", c_double), ("imag", c_double)]


SCALARS: dict[str, Any] = {
    "s": c_float,
    "d": c_double,
    "c": _ComplexFloat,
    "z": _ComplexDouble,
}
REALS: dict[str, Any] = {"s": c_float, "d": c_double, "c": c_float, "z": c_double}
REAL_LETTERS = {"s": "s", "d": "d", "c": "s", "z": "d"}

# The arguments of El<name>_<letter>, one sign each. p: a pointer (matrix, permutation, grid,
# or where to put an answer); e: int or enum; I: ElInt; b: bool; t: a number of the matrix's
# type; r: a real of its precision; Q, R, L: controls by value (QR, RPCA, NNLS).
MATRIX = {
    "DistMatrixCreateSpecific": "eepp",
    "DistMatrixAttach": "pIIpeepIe",
    "DistMatrixLockedAttach": "pIIpeepIe",
    "DistMatrixEmpty": "pb",
    "DistMatrixHeight": "pp",
    "DistMatrixWidth": "pp",
    "DistMatrixLDim": "pp",
    "DistMatrixLockedBuffer": "pp",
    "CopyDist": "pp",
}
FIELD = MATRIX | {
    "GemmDist": "eetpptp",
    "MakeTrapezoidalDist": "epI",
    "CholeskyDist": "ep",
    "LUPartialPivDist": "pp",
    "QRExplicitDist": "pp",
    "QRColPivDist": "pppp",
    "ApplyQAfterQRDist": "eepppp",
    "IDDist": "pppQb",
    "LinearSolveDist": "pp",
    "LeastSquaresDist": "eppp",
    "SVDDist": "pppp",
    "SingularValuesDist": "pp",
    "HermitianEigPairDist": "eppp",
    "PolarDecompDist": "pp",
    "PseudoinverseDist": "p",
    "NormDist": "pep",
    "ConditionDist": "pep",
    "RPCAXDist": "pppR",
}
COMPLEX = {"MakeHermitianDist": "ep"}
REAL = {
    "MakeSymmetricDist": "ep",
    "NNLSXDist": "pppL",
    "BPDNDist": "pprp",
    "ENDist": "pprrp",
    "BPDist": "ppp",
    "LAVDist": "ppp",
    "SVMDist": "pprp",
}
PLAIN = {
    "Initialize": "pp",
    "Initialized": "p",
    "Using64BitInt": "p",
    "GridCreateSpecific": "eeep",
    "GridDestroy": "p",
    "GridHeight": "pp",
    "GridWidth": "pp",
    "DistPermutationCreate": "pp",
    "DistPermutationDestroy": "p",
    "DistPermutationExplicitVector": "pp",
    "QRCtrlDefault_s": "p",
    "QRCtrlDefault_d": "p",
    "RPCACtrlDefault_s": "p",
    "RPCACtrlDefault_d": "p",
    "NNLSCtrlDefault_s": "p",
    "NNLSCtrlDefault_d": "p",
}

TABLES = ((MATRIX, "i"), (FIELD, "sdcz"), (REAL, "sd"), (COMPLEX, "cz"))  # with their letters

_opened: dict[str, LibEl] = {}  # by real path; at most one


class LibEl:
    """A libEl that is loaded into this process.

    Parameters
    ----------
    library : ctypes.CDLL
        The opened library.
    path : str
        Its file, for messages.

    Attributes
    ----------
    path : str
    int : ctypes type
        The type of ElInt: c_int, or c_longlong in a build with 64-bit integers.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        missing: list[str] = []
        using64 = c_bool()
        try:
            library.ElUsing64BitInt(ctypes.byref(using64))
        except AttributeError:
            missing.append("ElUsing64BitInt")
        self.int: Any = c_longlong if using64.value else c_int
        self._functions: dict[str, Any] = {}
        wanted = {name: (signs, "d") for name, signs in PLAIN.items()}
        for table, letters in TABLES:
            wanted |= {f"{name}_{k}": (s, k) for name, s in table.items() for k in letters}
        for name, (signs, letter) in wanted.items():
            try:
                function = getattr(library, f"El{name}")
            except AttributeError:
                missing.append(f"El{name}")
                continue
            function.argtypes = [self._type(sign, letter) for sign in signs]
            function.restype = c_int
            self._functions[name] = function
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise Failure(
                "LibraryLoadError",
                f"library 'elemental': {path} has no {', '.join(missing[:3])}{more}: it is not "
                "Elemental 0.88's libEl with its C interface",
            )
        self._messages = ErrorMessages(library)

    def _type(self, sign: str, letter: str) -> Any:
        if sign in "tr":
            return (SCALARS if sign == "t" else REALS).get(letter)
        names = {"Q": "QR", "R": "RPCA", "L": "NNLS"}
        if sign in names:
            return control(names[sign], REALS[letter], self.int)
        return {"p": c_void_p, "e": c_int, "I": self.int, "b": c_bool}[sign]

    def call(self, name: str, *args: Any) -> None:
        """Call ``El<name>``.

        Raises
        ------
        Failure
            ResourceError if it could not allocate, else RoutineError, with Elemental's message.
        """
        with self._messages.capture():
            code = self._functions[name](*args)
        if code != 0:
            raise failure(f"El{name}", code, self._messages.take())

    def scalar(self, value: complex, letter: str) -> Any:
        """`value` as the number type of `letter`, to be passed by value."""
        kind = SCALARS[letter]
        return kind(value.real, value.imag) if letter in "cz" else kind(value.real)

    def control(self, name: str, letter: str, **settings: Any) -> Any:
        """Elemental's defaults of a control structure, with `settings` changed."""
        made = control(name, REALS[letter], self.int)()
        self.call(f"{name}CtrlDefault_{REAL_LETTERS[letter]}", ctypes.byref(made))
        for field, value in settings.items():
            setattr(made, field, value)
        return made


def failure(function: str, code: int, words: str) -> Failure:
    """The error for a code other than EL_SUCCESS."""
    kind = "ResourceError" if CODES.get(code) == "EL_ALLOC_ERROR" else "RoutineError"
    reason = words or "no reason was printed (see the rank's stderr)"
    return Failure(kind, f"Elemental's {function} failed: {reason} ({CODES.get(code, code)})")


def find(path: str | None = None) -> LibEl:
    """Load libEl: from `path`, else from ELEMENTAL_LIB, else where the loader finds it.

    Raises
    ------
    Failure
        LibraryNotFoundError if it is not there; LibraryLoadError if it is there and does
        not load, lacks a function, or is linked to another MPI than this process.
    """
    name = path or os.environ.get(VARIABLE) or NAME
    asked = "load_library()" if path else VARIABLE if name != NAME else "the loader's path"
    if name != NAME and not Path(name).is_file():
        raise Failure(
            "LibraryNotFoundError",
            f"library 'elemental': there is no file {name} on node {os.uname().nodename} "
            f"(from {asked}). {HOW}",
        )
    if _opened and name == NAME:
        return next(iter(_opened.values()))
    if os.path.realpath(name) in _opened:
        return _opened[os.path.realpath(name)]
    if _opened:
        raise Failure(
            "LibraryLoadError",
            f"library 'elemental': this gang has loaded {next(iter(_opened))}, and a process can "
            f"load only one Elemental: call request_workers() again to use {name}",
        )
    provide_mpich()
    try:
        with known_processor():
            library = ctypes.CDLL(name)
    except OSError as error:
        if name == NAME and str(error).startswith(f"{NAME}: cannot open"):
            raise Failure(
                "LibraryNotFoundError",
                f"library 'elemental': {VARIABLE} is not set, and the loader does not find {NAME} "
                f"on node {os.uname().nodename} ({error}). {HOW}",
            ) from error
        raise Failure(
            "LibraryLoadError", f"library 'elemental': {name} does not load: {error}. {HOW}"
        ) from error
    found = LibEl(library, name)
    _check_mpi(library, name)
    _opened[symbol_file(library, "ElInitialize") or name] = found
    return found


def _check_mpi(library: ctypes.CDLL, name: str) -> None:
    """Refuse a libEl that would run on another MPI than mpi4py: its communicators are not ours."""
    ours, theirs = (
        symbol_file(ctypes.CDLL(MPI.__file__), "MPI_Comm_rank"),
        symbol_file(library, "MPI_Comm_rank"),
    )
    if ours != theirs:
        raise Failure(
            "LibraryLoadError",
            f"library 'elemental': {name} is linked to the MPI in {theirs or 'no library'}, and "
            f"this gang runs on the MPI in {ours}. {HOW}",
        )
    if MPI._sizeof(MPI.Comm) != ctypes.sizeof(c_int):
        raise Failure(
            "LibraryLoadError",
            "library 'elemental': this MPI's communicators are not integers as MPICH's are",
        )
