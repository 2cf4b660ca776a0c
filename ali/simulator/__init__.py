"""Simulations on a gang: loads a simulator and runs a whole step in one call.

A simulator is a library with the routines ``spec``, ``reset``, ``step``, ``get_state`` and
``get_score`` (see `ali.simulator.instance`). This library hosts simulators: `attach` creates one
or more instances, and `begin` and `advance` run an episode's first observation or a time step on
each. Actions are float64; observations have the dtype of the spec.
"""

from ali.simulator.routines import (
    advance,
    attach,
    begin,
    close,
    load_copy,
    load_state,
    render,
    save_copy,
    save_state,
    serve,
)

__all__ = [
    "advance",
    "attach",
    "begin",
    "close",
    "load_copy",
    "load_state",
    "render",
    "save_copy",
    "save_state",
    "serve",
]
