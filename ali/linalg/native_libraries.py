"""Routines of native libraries, for the argument `method` of routines of linalg."""

from __future__ import annotations

from typing import Any

from ali import elemental, scalapack
from ali.interface import Context
from mpi_workers.matrix.dist_matrix import DistMatrix

LIBRARIES: dict[str, Any] = {"scalapack": scalapack, "elemental": elemental}
METHODS = ("auto", *LIBRARIES)


def call(ctx: Context, method: str, routine: str, *arguments: Any) -> Any:
    """The results of a library's routine of that name, whole matrices in VC_STAR. Collective.

    The library that the ranks have loaded is used, else the one that ``load_library`` would find.

    Raises
    ------
    Failure
        LibraryNotFoundError or LibraryLoadError if it is not installed; it says how to install one.
    """
    library = LIBRARIES[method]
    state = ctx.state.get(method)
    if state is None:
        state = {}
        library.load(state, None)
        ctx.state[method] = state
    found = getattr(library, routine)(Context(ctx.gang, state), *arguments)
    if isinstance(found, tuple):
        return tuple(_in_rows(ctx, one) for one in found)
    return _in_rows(ctx, found)


def _in_rows(ctx: Context, found: Any) -> Any:
    if not isinstance(found, DistMatrix) or found.layout == "STAR_STAR":
        return found
    return ctx.to_layout(found, "VC_STAR")


def close(state: dict[str, Any]) -> None:
    """Release the grids of the libraries that were used."""
    for method, library in LIBRARIES.items():
        if method in state:
            library.close(state.pop(method))
