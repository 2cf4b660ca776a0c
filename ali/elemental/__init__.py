"""Elemental: dense linear algebra and optimisation on distributed matrices.

Routines of libEl, which is not shipped: it is found as ``load_library("elemental", path)``, in
the variable ELEMENTAL_LIB, or on the loader's path. Matrices are taken in any layout (all
14 are Elemental's own, and are used without a copy; Elemental itself moves other layouts to
MC_MR) and are never changed. Results come in MC_MR, small ones in STAR_STAR.

A call is native code: it can be neither interrupted nor cancelled, and reports no progress. An
error that Elemental finds fails the call with its message; if it leaves some ranks waiting in
native MPI, the gang is ended.

"Error" and "Peak memory" of docstrings are those of `ali.linalg`, measured on 1 to 4 ranks in
float32 for matrices of order 200 and of 2000 x 20 numbers (errors), and on 2 ranks in float64 for
order 1200 and 100000 x 40 (memory). Interior point methods, which hold a system of all rows and
columns, were measured for 50 x 25 (errors) and 300 x 150 elements (memory).

Source: Poulson, Marker, van de Geijn, Hammond, Romero, "Elemental: A new framework for
distributed memory dense matrix computations", ACM TOMS 39(2), 2013.
"""

from __future__ import annotations

from typing import Any

from ali.elemental.library import find
from ali.elemental.views import release
from ali.interface import collect_routines

PURE = True  # no routine has other effects than its results

__all__ = collect_routines(__name__)


def load(state: dict[str, Any], path: str | None) -> None:
    """Find libEl on this rank. Elemental itself starts with the first routine, on all ranks."""
    state["libEl"] = find(path)


def close(state: dict[str, Any]) -> None:
    """Release the grid."""
    release(state)
