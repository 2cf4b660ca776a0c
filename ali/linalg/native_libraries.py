"""Routines of native libraries, for the argument `method` of routines of linalg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ali import elemental, scalapack
from ali.blocks import require_choice
from ali.interface import Context
from mpi_workers.matrix.dist_matrix import DistMatrix

LIBRARIES: dict[str, Any] = {"scalapack": scalapack, "elemental": elemental}
T = TypeVar("T")


def call(ctx: Context, method: str, routine: Callable[..., T], *arguments: Any) -> T:
    """The results of a library's routine of that name, whole matrices in VC_STAR. Collective.

    The library that the ranks have loaded is used, else the one that ``load_library`` would find.

    Parameters
    ----------
    method : str
        The library. Its routine has the name and the results of `routine`.

    Raises
    ------
    Failure
        BadArgumentError for an unknown method; LibraryNotFoundError or LibraryLoadError if the
        library is not installed; it says how to install one.
    """
    name = routine.__name__
    require_choice(name, "method", method, ("auto", *LIBRARIES))
    library = LIBRARIES[method]
    state = ctx.state.get(method)
    if state is None:
        state = {}
        library.load(state, None)
        ctx.state[method] = state
    found = getattr(library, name)(Context(ctx.gang, state, shipped=True), *arguments)
    moved: T = _in_rows(ctx, found)
    return moved


def _in_rows(ctx: Context, found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(_in_rows(ctx, one) for one in found)
    if not isinstance(found, DistMatrix) or found.layout == "STAR_STAR":
        return found
    return ctx.to_layout(found, "VC_STAR")


def close(state: dict[str, Any]) -> None:
    """Release the grids of the libraries that were used."""
    for method, library in LIBRARIES.items():
        if method in state:
            library.close(state.pop(method))
