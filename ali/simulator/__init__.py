"""Simulations on a gang: loads a simulator and runs a whole step in one call.

A simulator is a library with the routines ``spec``, ``reset``, ``step``, ``get_state`` and
``get_score`` (see `ali.simulator.instance`). This library hosts simulators: `attach` creates one
or more instances, and `begin` and `advance` run an episode's first observation or a time step on
each. Actions are float64; observations have the dtype of the spec.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

import numpy as np

from ali import registry
from ali.interface import Context, routine
from ali.simulator.host import Simulations
from ali.simulator.spec import open_shared
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.wire import sockets
from mpi_workers.wire.blocking import Connection, ShortWait, connect
from mpi_workers.wire.frames import Body, ConnectionLost, Kind, WireError

POLL_INTERVAL_S = 1.0  # between checks whether the call has failed on another rank
DIAL_S = 5.0


class OrderChannel:
    """Receives orders from the client, one at a time; rank 0 answers.

    Parameters
    ----------
    ctx : Context
        Context of the routine that serves.
    addresses : list of str
        The client's listening addresses: a Unix socket of its node, a TCP port.
    token : str
        The client's secret.

    Raises
    ------
    Failure
        TransferError, if the client cannot be reached.
    """

    def __init__(self, ctx: Context, addresses: list[str], token: str) -> None:
        self._ctx = ctx
        try:
            self._connection: Connection = connect(
                sockets.reachable_addresses(addresses)[0],
                token,
                {"rank": ctx.rank},
                timeout_s=DIAL_S,
                take_fds=False,
            )[0]
        except (OSError, WireError, Failure, IndexError) as error:
            raise Failure(
                "TransferError", f"rank {ctx.rank} cannot reach its client at {addresses}: {error}"
            ) from None

        readable = select.poll()
        readable.register(self._connection.sock, select.POLLIN)
        self._wait = ShortWait(readable)

    def next(self) -> Body | None:
        """The next order; None if the client has disconnected. Raises `Interrupted`."""
        try:
            while not (self._connection.buffered or self._wait(1e3 * POLL_INTERVAL_S)):
                self._ctx.check()
            frame = self._connection.recv()
        except (ConnectionLost, WireError):
            return None
        return frame.body if frame.kind == Kind.COMMAND else None

    def answer(self, order: Body, **told: Any) -> None:
        """Send the result from rank 0. A lost client is noticed by the next `next`."""
        if self._ctx.rank == 0:
            try:
                self._connection.send(Kind.REPLY, {"n": order["n"], **told})
            except WireError:
                return

    def close(self) -> None:
        self._connection.close()


HOST = "simulations"


class Refusal(Failure):
    """An order that all ranks refuse, before any simulation has received it."""


@routine("spec")
def attach(
    ctx: Context, name: str, path: str | None = None, config: str = "{}", copies: int = 1
) -> str:
    """Load a simulator and set up its copies, replacing the simulator that was attached before.

    Parameters
    ----------
    name : string
        Name of the library: shipped, installed, or any name with a path.
    path : string
        A Python file or a shared object that every node can read.
    config : string
        JSON for the simulator's ``setup``.
    copies : int
        Number of independent simulations. All ranks compute a single one together; several
        are distributed over the ranks.

    Returns
    -------
    spec : string
        The simulator's spec as JSON, with defaults filled in.

    Raises
    ------
    LibraryNotFoundError, LibraryLoadError
        If the library does not exist, or is not a simulator.
    BadArgumentError
        For copies below 1, or if the simulator's ``setup`` refuses the options.
    """
    if copies < 1:
        raise Failure("BadArgumentError", f"copies={copies}: it must be at least 1")
    close(ctx.state)
    host = Simulations(ctx, lambda: registry.load(name, path), name, config, copies)
    ctx.state[HOST] = host
    return host.spec.text


@routine("records")
def begin(ctx: Context, which: list[int], seeds: list[int]) -> bytes:
    """Begin an episode in some copies; the others do not change.

    Parameters
    ----------
    which : list of int
        Numbers of copies.
    seeds : list of int
        One for each copy; a negative seed is ignored.

    Returns
    -------
    records : bytes
        A row per copy, in the layout of the spec (`ali.simulator.spec.Spec`).
        Only the observations of copies in `which` are valid.

    Raises
    ------
    BadArgumentError
        For copies that do not exist.
    RoutineError
        With the simulator's message. The state of the simulations is then unknown.
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
    """Advance every copy by a time step; copies in `which` begin an episode instead.

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
        If the count of numbers is wrong, or one is NaN, infinite or not a valid choice. The
        simulations have not received it.
    RoutineError
        With the simulator's message. The state of the simulations is then unknown.
    """
    host = _host(ctx)
    fresh = _fresh(host, which or [], seeds or [])
    return host.run(ctx, fresh, _actions(host, actions, fresh))


@routine("height", "width", "field")
def render(ctx: Context, copy: int = 0) -> tuple[int, int, bytes]:
    """The field that a copy renders, as float32 row by row; the first row is the top.

    Raises
    ------
    NoSuchRoutineError
        If the simulator has no ``render``.
    """
    return _copy(ctx, copy, "render").picture(ctx, copy)


@routine("state")
def save_state(ctx: Context) -> DistMatrix:
    """The state of the simulation, which must be the only one, as its library returns it."""
    return _copy(ctx, 0, "save_state").save(ctx)


@routine()
def load_state(ctx: Context, state: DistMatrix) -> None:
    """Restore a state of `save_state`."""
    _copy(ctx, 0, "load_state").load(ctx, state)


@routine("shape", "dtype", "elements")
def save_copy(ctx: Context, copy: int) -> tuple[list[int], str, bytes]:
    """The state of one of several copies: shape, dtype, elements in C order.

    Raises
    ------
    NoSuchRoutineError
        If the simulator has no ``save_state``.
    """
    return _copy(ctx, copy, "save_state").save_copy(ctx, copy)


@routine()
def load_copy(ctx: Context, copy: int, shape: list[int], dtype: str, elements: bytes) -> None:
    """Restore the state of one of several copies, from `save_copy` of this or another gang.

    Raises
    ------
    NoSuchRoutineError
        If the simulator has no ``load_state``.
    """
    state = np.frombuffer(elements, dtype).reshape(shape)
    _copy(ctx, copy, "load_state").load_copy(ctx, copy, state)


@routine()
def serve(ctx: Context, addresses: list[str], token: str, shared: str | None = None) -> None:
    """Execute orders that the client sends directly (`ORDERS`).

    Returns when the client disconnects. Orders bypass the GroupManager and the proxies. An
    exception of a simulator ends this call; a refused order is answered with an error.

    Parameters
    ----------
    addresses : list of string
        Addresses at which the client listens.
    token : string
        The client's secret.
    shared : string
        Memory of the client in which rank 0 leaves records, see `open_shared`. Where it is on
        another node, records are in the answers.
    """
    host = _host(ctx)
    # Before the client is connected: it then closes its descriptor.
    size = host.copies * host.spec.layout.itemsize
    host.share(open_shared(shared, size) if ctx.rank == 0 else None)
    channel = OrderChannel(ctx, addresses, token)
    try:
        while (order := channel.next()) is not None:
            try:
                told = ORDERS[order["do"]](ctx, *order["arguments"])
            except Refusal as refusal:
                channel.answer(order, refused=refusal.to_map())
            else:
                channel.answer(order, value=told)
    finally:
        channel.close()
        host.share(None)


ORDERS: dict[str, Callable[..., Any]] = {
    order.__name__: order for order in (begin, advance, render, save_copy, load_copy)
}


def close(state: dict[str, Any]) -> None:
    """Close the simulator."""
    host = state.pop(HOST, None)
    if host is not None:
        host.close()


def _host(ctx: Context) -> Simulations:
    host: Simulations | None = ctx.state.get(HOST)
    if host is None:
        raise Refusal(
            "LibraryNotFoundError",
            "no simulator is attached, or its ranks were started again: call attach(name, ...) "
            "first",
        )
    return host


def _copy(ctx: Context, copy: int, routine: str) -> Simulations:
    """The simulations, if there is such a copy and their library has a routine."""
    host = _host(ctx)
    if not host.has(routine):
        raise Refusal("NoSuchRoutineError", f"the simulator has no routine {routine!r}")
    if not 0 <= copy < host.copies:
        raise Refusal(
            "BadArgumentError",
            f"there is no copy {copy}: copies are numbered 0 to {host.copies - 1}",
        )
    return host


def _fresh(host: Simulations, which: list[int], seeds: list[int]) -> dict[int, int]:
    if not which and not seeds:
        return {}
    if len(which) != len(seeds) or any(not 0 <= copy < host.copies for copy in which):
        raise Refusal(
            "BadArgumentError",
            f"which={which}, seeds={seeds}: give a seed for each copy, of copies 0 to "
            f"{host.copies - 1}",
        )
    return dict(zip(which, seeds, strict=True))


def _actions(host: Simulations, raw: bytes, fresh: dict[int, int]) -> np.ndarray[Any, Any]:
    spec = host.spec
    wanted = host.copies * spec.actions
    if len(raw) != 8 * wanted:
        raise Refusal(
            "BadArgumentError",
            f"the action has {len(raw) / 8:g} numbers; the simulator takes {wanted}",
        )
    actions = np.frombuffer(raw).reshape(host.copies, spec.actions)
    stepped = actions
    if fresh:
        stepped = actions[[copy not in fresh for copy in range(host.copies)]]
    if not np.isfinite(stepped).all():
        raise Refusal("BadArgumentError", "the action contains NaN or infinity")
    if spec.choices is not None:
        chosen = (stepped >= 0) & (stepped < spec.choices) & (stepped == np.floor(stepped))
        wrong = ~chosen & np.isfinite(spec.choices)
        if wrong.any():
            most = int(spec.choices[np.argwhere(wrong)[0, 1]]) - 1
            raise Refusal("BadArgumentError", f"the action must be a choice from 0 to {most}")
    return actions
