"""The routines by which a simulator is driven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ali import registry
from ali.interface import Context, routine
from ali.simulator.host import Simulations
from ali.simulator.line import Line
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix

HOST = "simulations"


class Refusal(Failure):
    """What is refused by all ranks alike, before any simulation has seen it."""


@routine("spec")
def attach(
    ctx: Context, name: str, path: str | None = None, config: str = "{}", copies: int = 1
) -> str:
    """Load a simulator and set up its copies; what was attached before is given up.

    Parameters
    ----------
    name : string
        Of the library: shipped, installed, or any with a path.
    path : string
        A Python file or a shared object that every node can read.
    config : string
        JSON for the simulator's ``setup``.
    copies : int
        Simulations of their own: 1 is computed by all ranks together, more are dealt to
        the ranks.

    Returns
    -------
    spec : string
        What the simulator says of itself, as JSON with defaults filled in.

    Raises
    ------
    LibraryNotFoundError, LibraryLoadError
        If there is no such library, or it is not a simulator.
    BadArgumentError
        For copies below 1, and what the simulator's ``setup`` refuses.
    """
    if copies < 1:
        raise Failure("BadArgumentError", f"copies={copies}: it is at least 1")
    close(ctx.state)
    host = Simulations(ctx, lambda: registry.load(name, path), name, config, copies)
    ctx.state[HOST] = host
    return host.spec.text


@routine("records")
def begin(ctx: Context, which: list[int], seeds: list[int]) -> bytes:
    """Begin an episode in some copies; the others stay as they are.

    Parameters
    ----------
    which : list of int
        Numbers of copies.
    seeds : list of int
        One for each; below 0: none.

    Returns
    -------
    records : bytes
        A row of float64 per copy: the observation, the scores, 1.0 if it has ended. Only the
        observations of copies that have begun are of meaning.

    Raises
    ------
    BadArgumentError
        For copies that there are not.
    RoutineError
        In the simulator's words. The state of the simulations is not known then.
    """
    host = _host(ctx)
    return host.run(ctx, _fresh(host, which, seeds), np.empty((0, host.spec.actions)))


@routine("records")
def advance(
    ctx: Context,
    actions: bytes,
    which: list[int] | None = None,
    seeds: list[int] | None = None,
) -> bytes:
    """A time step of every copy; those in `which` begin an episode instead, as in `begin`.

    Parameters
    ----------
    actions : bytes
        A row of float64 per copy.

    Returns
    -------
    records : bytes
        As in `begin`.

    Raises
    ------
    BadArgumentError
        If there are too few or too many numbers, or one is NaN, infinite or no choice; before
        any simulation has seen it.
    RoutineError
        In the simulator's words. The state of the simulations is not known then.
    """
    host = _host(ctx)
    fresh = _fresh(host, which or [], seeds or [])
    return host.run(ctx, fresh, _actions(host, actions, fresh))


@routine("height", "width", "field")
def render(ctx: Context, copy: int = 0) -> tuple[int, int, bytes]:
    """The field that a copy shows, as float32 row by row; its first row is the top.

    Raises
    ------
    NoSuchRoutineError
        If the simulator has no ``render``.
    """
    host = _host(ctx)
    if not host.has("render"):
        raise Refusal("NoSuchRoutineError", "the simulator has no routine 'render'")
    if not 0 <= copy < host.copies:
        raise Refusal("BadArgumentError", f"copy {copy}: there are {host.copies}")
    return host.picture(ctx, copy)


@routine("state")
def save_state(ctx: Context) -> DistMatrix:
    """The state of the simulation (there must be one only), as its library gives it."""
    return _host(ctx).save(ctx)


@routine()
def load_state(ctx: Context, state: DistMatrix) -> None:
    """Go back to a state that `save_state` gave."""
    _host(ctx).load(ctx, state)


@routine()
def serve(ctx: Context, addresses: list[str], token: str) -> None:
    """Take orders from a line to the client until it hangs up: `begin`, `advance`, `render`.

    An order costs neither the GroupManager nor a proxy a look. What a simulator raises ends
    this call; what is refused is answered.

    Parameters
    ----------
    addresses : list of string
        Where the client listens.
    token : string
        Its secret.
    """
    line = Line(ctx, addresses, token)
    try:
        while (order := line.next()) is not None:
            try:
                told = ORDERS[order["do"]](ctx, *order["arguments"])
            except Refusal as refusal:
                line.answer(order, refused=refusal.to_map())
            else:
                line.answer(order, value=told)
    finally:
        line.close()


ORDERS: dict[str, Callable[..., Any]] = {"begin": begin, "advance": advance, "render": render}


def close(state: dict[str, Any]) -> None:
    """Give up the simulator."""
    host = state.pop(HOST, None)
    if host is not None:
        host.close()


def _host(ctx: Context) -> Simulations:
    host: Simulations | None = ctx.state.get(HOST)
    if host is None:
        raise Refusal("BadArgumentError", "there is no simulator: attach(name, ...) one first")
    return host


def _fresh(host: Simulations, which: list[int], seeds: list[int]) -> dict[int, int]:
    if len(which) != len(seeds) or any(not 0 <= copy < host.copies for copy in which):
        raise Refusal(
            "BadArgumentError",
            f"which={which}, seeds={seeds}: as many of each, of copies 0 to {host.copies - 1}",
        )
    return dict(zip(which, seeds, strict=True))


def _actions(host: Simulations, raw: bytes, fresh: dict[int, int]) -> np.ndarray[Any, Any]:
    spec = host.spec
    wanted = host.copies * spec.actions
    if len(raw) != 8 * wanted:
        raise Refusal(
            "BadArgumentError", f"an action of {len(raw) / 8:g} numbers: there are {wanted}"
        )
    actions = np.frombuffer(raw).reshape(host.copies, spec.actions)
    stepped = actions
    if fresh:
        stepped = actions[[copy not in fresh for copy in range(host.copies)]]
    if not np.isfinite(stepped).all():
        raise Refusal("BadArgumentError", "an action with a number that is NaN or infinite")
    if spec.choices is not None:
        chosen = (stepped >= 0) & (stepped < spec.choices) & (stepped == np.floor(stepped))
        if not chosen.all():
            words = f"an action that is none of the choices 0 to {spec.choices - 1}"
            raise Refusal("BadArgumentError", words)
    return actions
