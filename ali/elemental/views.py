"""Matrices of the gang as Elemental's: the same memory in all 14 layouts.

`DistMatrix.local` has the form that Elemental needs (Fortran order, aligned at rank 0), so it is
used without a copy. Elemental's objects are kept in `Context.state`: a grid, and matrix objects for
reuse (the C interface cannot delete them).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ali.blocks import require, require_finite, shape_text
from ali.elemental.library import LETTERS, LibEl
from ali.interface import Context
from ali.native.grids import Grid, kept
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import LAYOUTS

COLUMN_MAJOR = 1  # ElGridOrderType
LOWER = 0  # ElUpperOrLower
LEFT = 0  # ElLeftOrRight
NORMAL, TRANSPOSE, ADJOINT = 0, 1, 2  # ElOrientation
MAX_NORM = 3  # ElNormType
DISTS = {"MC": 0, "MD": 1, "MR": 2, "VC": 3, "VR": 4, "STAR": 5, "CIRC": 6}  # ElDist
INTS = {4: np.int32, 8: np.int64}  # by the bytes of an ElInt


class _Object(NamedTuple):
    """An ElDistMatrix: its address, its number type, its layout."""

    pointer: int
    letter: str
    layout: str


class _Grid(Grid):
    """Elemental's grid, on communicators that it has duplicated, and matrix objects on it."""

    def __init__(self, lib: LibEl, ctx: Context) -> None:
        super().__init__(ctx)
        self.spare: list[_Object] = []
        pointer = ctypes.c_void_p()
        lib.call(
            "GridCreateSpecific",
            MPI._handleof(ctx.comm),
            ctx.grid[0],
            COLUMN_MAJOR,
            ctypes.byref(pointer),
        )
        self.pointer = pointer.value
        height, width = ctypes.c_int(), ctypes.c_int()
        lib.call("GridHeight", self.pointer, ctypes.byref(height))
        lib.call("GridWidth", self.pointer, ctypes.byref(width))
        if (height.value, width.value) != ctx.grid:
            raise Failure(
                "RoutineError",
                f"Elemental's grid is {height.value} x {width.value} and the gang's "
                f"{ctx.grid[0]} x {ctx.grid[1]}",
            )


def _grid(lib: LibEl, ctx: Context) -> _Grid:
    """The grid of the gang (see `kept`)."""

    def make() -> _Grid:
        begun = ctypes.c_bool()
        lib.call("Initialized", ctypes.byref(begun))
        if not begun.value:  # MPI is initialised, so Elemental will not, nor finalize it
            count, words = ctypes.c_int(0), ctypes.c_void_p()
            lib.call("Initialize", ctypes.byref(count), ctypes.byref(words))
        return _Grid(lib, ctx)

    return kept(ctx, make, "Elemental's grid")


def release(state: dict[str, Any]) -> None:
    """Release the grid, if there is one."""
    held: _Grid | None = state.pop("grid", None)
    if held is not None:
        state["libEl"].call("GridDestroy", held.pointer)


class Elemental:
    """One routine's use of Elemental, as a context manager.

    ::

        with Elemental(ctx) as el:
            C = el.empty((m, n), A.dtype)
            el("GemmDist", A.dtype, NORMAL, NORMAL, one, A, B, zero, C)

    Matrices among the arguments of a call are attached: those of `empty`, `zeros` and `copy`
    writable, all others locked. After the call, results are in the gang's memory, wherever
    Elemental has put them. All ranks make every call; a rank that fails raises at once, and the
    others wait for it in `ctx.comm`, where they can be interrupted, not in the next native call.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.lib: LibEl = ctx.state["libEl"]
        self._grid = _grid(self.lib, ctx)
        self._writable: set[int] = set()
        self._objects: dict[tuple[int, str], _Object] = {}
        self._owned: list[_Object] = []
        self._permutations: list[int] = []
        self._kept: list[DistMatrix] = []  # so that their ids stay theirs

    def __enter__(self) -> Elemental:
        return self

    def __exit__(self, *_: object) -> None:
        for pointer in self._permutations:
            self.lib.call("DistPermutationDestroy", pointer)
        for held in [*self._objects.values(), *self._owned]:
            self._give_back(held)

    # --- matrices of ours ---

    def empty(self, shape: tuple[int, int], dtype: Any, layout: str = "MC_MR") -> DistMatrix:
        """A matrix of ours that Elemental may write."""
        return self._may_write(self.ctx.empty(shape, dtype, layout))

    def zeros(self, shape: tuple[int, int], dtype: Any, layout: str = "MC_MR") -> DistMatrix:
        """Like `empty`, with zeros in it."""
        return self._may_write(self.ctx.zeros(shape, dtype, layout))

    def copy(self, matrix: DistMatrix, layout: str = "MC_MR") -> DistMatrix:
        """A copy that Elemental may overwrite, in another layout if need be."""
        moved = self.ctx.to_layout(matrix, layout)
        if moved is matrix:
            moved = self.ctx.empty_like(matrix)
            moved.local[...] = matrix.local
        return self._may_write(moved)

    def _may_write(self, matrix: DistMatrix) -> DistMatrix:
        self._check_size(matrix.shape, matrix.layout)
        self._writable.add(id(matrix))
        self._kept.append(matrix)
        return matrix

    def floats(self, *matrices: DistMatrix) -> list[DistMatrix]:
        """The matrices with one floating dtype; those that have it already are themselves."""
        dtype = np.result_type(*(m.dtype for m in matrices))
        if dtype.kind in "biu":
            dtype = np.dtype(np.float64)
        found = []
        for matrix in matrices:
            if matrix.layout not in LAYOUTS:  # in blocks, which Elemental does not have
                matrix = self.ctx.to_layout(matrix, "MC_MR")
            self._check_size(matrix.shape, matrix.layout)
            if matrix.dtype != dtype:
                cast = self.ctx.empty(matrix.shape, dtype, matrix.layout)
                cast.local[...] = matrix.local
                matrix = cast
            found.append(matrix)
        return found

    def _check_size(self, shape: tuple[int, int], layout: str) -> None:
        """Check sizes against ElInt, also for the copies in MC_MR that Elemental makes."""
        m, n = shape
        height, width = self.ctx.grid
        require(m > 0 and n > 0, "ShapeError", f"Elemental: a {m} x {n} matrix has no elements")
        rows, cols = (dist in ("STAR", "CIRC") for dist in layout.split("_"))
        local = max(
            -(-m // height) * -(-n // width),
            (m if rows else 0) * (n if cols else 0),
        )
        limit = (1 << (8 * ctypes.sizeof(self.lib.int) - 1)) - 1
        require(
            max(m, n, local) <= limit,
            "ShapeError",
            f"Elemental: the integers of this libEl end at {limit}, too small for a {m} x {n} "
            f"matrix ({local} elements on a rank); use more ranks, or a libEl built with 64-bit "
            "integers",
        )

    # --- Elemental's own ---

    def own(self, dtype: Any, layout: str = "MC_MR") -> _Object:
        """An empty matrix of Elemental's, for results of unknown shape; see `taken`."""
        made = self._object(_letter(dtype), layout)
        self._owned.append(made)
        return made

    def permutation(self) -> int:
        """An empty DistPermutation."""
        pointer = ctypes.c_void_p()
        self.lib.call("DistPermutationCreate", ctypes.byref(pointer), self._grid.pointer)
        assert pointer.value is not None
        self._permutations.append(pointer.value)
        return pointer.value

    def indices(self, permutation: int, length: int) -> DistMatrix:
        """A permutation as a column, shape (length, 1), int64, STAR_STAR. One copy."""
        whole = self.empty((length, 1), INTS[ctypes.sizeof(self.lib.int)], "STAR_STAR")
        held = self._attached(whole, "i")
        self._checked("DistPermutationExplicitVector", permutation, held.pointer)
        self._settle(whole, "i")
        if whole.dtype == np.int64:
            return whole
        wide = self.ctx.empty((length, 1), np.int64, "STAR_STAR")
        wide.local[...] = whole.local
        return wide

    def shape(self, held: _Object) -> tuple[int, int]:
        """Height and width of a matrix of Elemental's."""
        return self._ask(held, "Height"), self._ask(held, "Width")

    def taken(self, held: _Object, dtype: Any, layout: str = "MC_MR") -> DistMatrix:
        """A matrix of Elemental's in memory of ours. One copy."""
        matrix = self.empty(self.shape(held), dtype, layout)
        self._checked(
            f"CopyDist_{held.letter}", held.pointer, self._attached(matrix, held.letter).pointer
        )
        return matrix

    # --- calls ---

    def __call__(self, name: str, dtype: Any, *args: Any) -> None:
        """Call ``El<name>_<letter of dtype>``. Collective.

        Raises
        ------
        Failure
            RoutineError or ResourceError, with Elemental's words.
        """
        matrices = [arg for arg in args if isinstance(arg, DistMatrix)]
        self._checked(f"{name}_{_letter(dtype)}", *map(self._native, args))
        for matrix in matrices:
            if id(matrix) in self._writable:
                self._settle(matrix, _letter(matrix.dtype))

    def number(self, name: str, dtype: Any, *args: Any) -> float:
        """Like a call, with a real answer behind the other arguments."""
        answer = np.zeros(1, np.zeros(0, dtype).real.dtype)
        self(name, dtype, *args, answer.ctypes.data)
        return float(answer[0])

    def number_of(self, value: complex, dtype: Any) -> Any:
        """A number in the type that Elemental takes with matrices of this dtype."""
        return self.lib.scalar(value, _letter(dtype))

    def control(self, name: str, dtype: Any, **settings: Any) -> Any:
        """Elemental's defaults of a control structure, with `settings` changed."""
        return self.lib.control(name, _letter(dtype), **settings)

    def _native(self, arg: Any) -> Any:
        if isinstance(arg, DistMatrix):
            return self._attached(arg, _letter(arg.dtype)).pointer
        return arg.pointer if isinstance(arg, _Object) else arg

    def _checked(self, name: str, *args: Any) -> None:
        with self._grid.in_native(f"Elemental's El{name}"):
            self.lib.call(name, *args)
        self.ctx.comm.Barrier()

    # --- objects ---

    def _object(self, letter: str, layout: str) -> _Object:
        for spare in self._grid.spare:
            if (spare.letter, spare.layout) == (letter, layout):
                self._grid.spare.remove(spare)
                return spare
        pointer = ctypes.c_void_p()
        rows, cols = (DISTS[dist] for dist in layout.split("_"))
        self.lib.call(
            f"DistMatrixCreateSpecific_{letter}",
            rows,
            cols,
            self._grid.pointer,
            ctypes.byref(pointer),
        )
        assert pointer.value is not None
        return _Object(pointer.value, letter, layout)

    def _give_back(self, held: _Object) -> None:
        self.lib.call(f"DistMatrixEmpty_{held.letter}", held.pointer, True)
        self._grid.spare.append(held)

    def _attached(self, matrix: DistMatrix, letter: str) -> _Object:
        key = (id(matrix), letter)
        if key not in self._objects:
            self._kept.append(matrix)
            self._objects[key] = self._attach(matrix, letter)
        return self._objects[key]

    def _attach(self, matrix: DistMatrix, letter: str) -> _Object:
        held = self._object(letter, matrix.layout)
        locked = "" if id(matrix) in self._writable else "Locked"
        self.lib.call(
            f"DistMatrix{locked}Attach_{letter}",
            held.pointer,
            *matrix.shape,
            self._grid.pointer,
            0,  # both alignments: the first row and column are on the layout's first rank
            0,
            matrix.local.ctypes.data,
            matrix.leading_dimension,
            0,  # the root of CIRC_CIRC, the diagonal of MD
        )
        return held

    def _ask(self, held: _Object, what: str) -> int:
        answer = self.lib.int()
        self.lib.call(f"DistMatrix{what}_{held.letter}", held.pointer, ctypes.byref(answer))
        return int(answer.value)

    def _settle(self, matrix: DistMatrix, letter: str) -> None:
        """Copy results to the gang's memory, if Elemental has put them elsewhere. Collective.

        An attached matrix that is resized beyond its memory continues in Elemental's memory.
        Some ranks may have to copy and others not, so they agree.
        """
        held = self._objects[id(matrix), letter]
        shape = self.shape(held)
        if shape != matrix.shape:
            raise Failure(
                "RoutineError",
                f"Elemental returned a {shape[0]} x {shape[1]} matrix instead of "
                f"{shape_text(matrix)}",
            )
        buffer = ctypes.c_void_p()
        self.lib.call(f"DistMatrixLockedBuffer_{letter}", held.pointer, ctypes.byref(buffer))
        moved = bool(matrix.local.size) and (
            buffer.value != matrix.local.ctypes.data
            or self._ask(held, "LDim") != matrix.leading_dimension
        )
        anywhere = np.array([moved], np.int32)
        self.ctx.comm.Allreduce(anywhere.copy(), anywhere, MPI.MAX)
        if anywhere[0]:
            ours = self._attach(matrix, letter)
            self._checked(f"CopyDist_{letter}", held.pointer, ours.pointer)
            self._give_back(held)
            self._objects[id(matrix), letter] = ours


def _letter(dtype: Any) -> str:
    return LETTERS[np.dtype(dtype).name]


@contextmanager
def started(ctx: Context, routine: str, **matrices: DistMatrix) -> Iterator[tuple[Any, ...]]:
    """`Elemental`, and the matrices with one floating dtype; NaN and infinity are refused.

    On those iterations may never end. Collective.
    """
    with Elemental(ctx) as el:
        found = el.floats(*matrices.values())
        local = {name: matrix.local for name, matrix in zip(matrices, found, strict=True)}
        require_finite(ctx, routine, **local)
        yield (el, *found)
