"""Simulations on a gang: loads a library that is one, and runs a whole step in one call.

A simulator is a library with the routines ``spec``, ``reset``, ``step``, ``get_state`` and
``get_score`` (see `ali.simulator.instance`). This library is their host: `attach` makes one or
more instances of a simulator, and `begin` and `advance` run on each what an episode's first
observation or a time step needs. Numbers travel as float64 in native byte order.
"""

from ali.simulator.routines import (
    advance,
    attach,
    begin,
    close,
    load_state,
    render,
    save_state,
    serve,
)

__all__ = ["advance", "attach", "begin", "close", "load_state", "render", "save_state", "serve"]
