"""libEl: its file, checks that it fits this process, functions, control structures and errors.

Elemental is not part of this project: it is found at run time, and an unsuitable libEl is reported
when the library is loaded, not by the first routine that needs it.

They must not depend on a rank's own elements. Elemental checks nothing: a release build of it
does not check dimensions.

Elemental writes to C++'s `std::cerr`. Redirecting the process's stderr during a call would also
hide the output of a crash or of MPI_Abort. Therefore only `std::cerr` gets another buffer during
a call, through libstdc++'s own functions.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_bool, c_double, c_float, c_int, c_longlong, c_void_p
from pathlib import Path
from typing import Any

from mpi4py import MPI

from ali.blocks import require, shape_text
from ali.loader import known_processor, provide_mpich, symbol_file
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix

LIMIT = 2000  # characters of Elemental's message that are passed on
APPEND_OUT = 1 | 16  # libstdc++'s std::ios_base::app | std::ios_base::out
FILEBUF_BYTES = 1024  # a std::filebuf takes about 240

# libstdc++'s names (its ABI has been frozen since GCC 3.4).
CERR = "_ZSt4cerr"
RDBUF = "_ZNSt9basic_iosIcSt11char_traitsIcEE5rdbufEPSt15basic_streambufIcS1_E"
FILEBUF = "_ZNSt13basic_filebufIcSt11char_traitsIcEEC1Ev"
OPEN = "_ZNSt13basic_filebufIcSt11char_traitsIcEE4openEPKcSt13_Ios_Openmode"


class ErrorMessages:
    """Captures the output of native code to `std::cerr`, with libstdc++ only.

    Parameters
    ----------
    library : ctypes.CDLL
        A library that is linked to libstdc++. With another C++ runtime `capture` captures
        nothing, and the messages stay in the rank's stderr.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._file = -1
        try:
            cerr = ctypes.addressof(ctypes.c_char.in_dll(library, CERR))
            construct, opened = getattr(library, FILEBUF), getattr(library, OPEN)
            self._rdbuf = getattr(library, RDBUF)
        except (AttributeError, ValueError):
            return
        # An ostream inherits its std::ios virtually: the offset stands before the vtable.
        table = ctypes.c_void_p.from_address(cerr).value
        if table is None:  # the streams are not initialised
            return
        self._ios = cerr + ctypes.c_ssize_t.from_address(table - 24).value
        construct.argtypes, construct.restype = [ctypes.c_void_p], None
        opened.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
        opened.restype = ctypes.c_void_p
        self._rdbuf.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._rdbuf.restype = ctypes.c_void_p
        self._buffer = ctypes.create_string_buffer(FILEBUF_BYTES)
        construct(self._buffer)
        file = os.memfd_create("elemental-errors", os.MFD_CLOEXEC)
        if opened(self._buffer, f"/proc/self/fd/{file}".encode(), APPEND_OUT):
            self._file = file
        else:
            os.close(file)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the output inside the block."""
        if self._file < 0:
            yield
            return
        before = self._rdbuf(self._ios, self._buffer)
        try:
            yield
        finally:
            self._rdbuf(self._ios, before)

    def take(self) -> str:
        """The output captured since the last call, on one line."""
        if self._file < 0:
            return ""
        said = os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace")
        os.ftruncate(self._file, 0)
        # "Process 3 caught error message:" stands before every message of Elemental's.
        lines = [line.strip() for line in said.splitlines() if " caught " not in line]
        return " ".join(filter(None, lines))[:LIMIT]


CType = Any  # a ctypes type


@functools.cache
def control(name: str, real: CType, integer: CType) -> type[ctypes.Structure]:
    """The structure ``El<name>Ctrl_{s,d}``.

    Parameters
    ----------
    name : str
        ``QR``, ``RPCA`` or ``NNLS`` (or one that those contain).
    real : ctypes type
        c_float or c_double.
    integer : ctypes type
        The type of ElInt in this libEl.
    """
    fields = {"real": real, "int": integer, "bool": c_bool, "enum": c_int, "rule": c_void_p}
    layout = []
    for line in _LAYOUTS[name]:
        kind, *members = line.split()
        layout += [(m, fields.get(kind) or control(kind, real, integer)) for m in members]
    return type(f"El{name}Ctrl", (ctypes.Structure,), {"_fields_": layout})


_LAYOUTS = {
    "QR": [
        "bool colPiv boundRank",
        "int maxRank",
        "bool adaptive",
        "real tol",
        "bool alwaysRecomputeNorms smallestFirst",
    ],
    "RPCA": [
        "bool useALM usePivQR progress",
        "int numPivSteps maxIts",
        "real tau beta rho tol",
    ],
    "RegSolve": [
        "enum alg",
        "real relTol relTolRefine",
        "int maxIts maxRefineIts restart",
        "bool progress time",
    ],
    "Mehrotra": [
        "bool primalInit dualInit",
        "real minTol targetTol",
        "int maxIts",
        "real maxStepRatio",
        "enum system",
        "bool mehrotra",
        "rule centralityRule",
        "bool standardInitShift",
        "real balanceTol",
        "bool forceSameStep",
        "RegSolve solveCtrl",
        "bool resolveReg outerEquil",
        "int basisSize",
        "bool print time",
        "real wSafeMaxNorm wMaxLimit ruizEquilTol",
        "int ruizMaxIter",
        "real diagEquilTol",
        "bool checkResiduals",
        "real reg0Tmp reg1Tmp reg2Tmp reg0Perm reg1Perm reg2Perm",
    ],
    "ADMM": ["real rho alpha", "int maxIter", "real absTol relTol", "bool inv print"],
    "Conic": ["enum approach", "Mehrotra mehrotraCtrl"],
    "NNLS": ["enum approach", "ADMM admmCtrl", "Conic qpCtrl socpCtrl"],
}


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


def _complex(real: CType) -> CType:
    return type("Complex", (ctypes.Structure,), {"_fields_": [("real", real), ("imag", real)]})


REALS: dict[str, Any] = {"s": c_float, "d": c_double, "c": c_float, "z": c_double}
SCALARS = REALS | {"c": _complex(c_float), "z": _complex(c_double)}

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
    **{f"{name}CtrlDefault_{letter}": "p" for name in ("QR", "RPCA", "NNLS") for letter in "sd"},
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
        precision = "s" if letter in "sc" else "d"
        self.call(f"{name}CtrlDefault_{precision}", ctypes.byref(made))
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


def column(matrix: DistMatrix, rows: int, name: str, what: str) -> None:
    """Require a matrix to be one column of this many rows."""
    require(
        matrix.shape == (rows, 1),
        "ShapeError",
        f"{name}: {what} is {shape_text(matrix)}; it must be {rows} x 1",
    )


def positive(name: str, what: str, value: float) -> None:
    """Require a number > 0 that is finite."""
    require(
        0 < value < math.inf,
        "BadArgumentError",
        f"{name}: {what}={value}: it must be above 0 and finite",
    )
