"""Runs on the head of `hosts.Hosts`: starts a gateway."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.access import TokenFile
from tests.faults.inside import join


def serve(nodes: int) -> dict[str, str]:
    """Start the gateway of a cluster of this many nodes; its address, and a token."""
    assert join(nodes) == nodes
    folder = os.environ["HOME"] = tempfile.mkdtemp()  # for the certificate, too
    tokens = TokenFile(Path(folder, "tokens.json"))
    token = tokens.create("anna", ("call", "run_code"))
    info = actor.serve("0.0.0.0", 0, tokens=str(tokens.path), audit=str(Path(folder, "audit.log")))
    return {"address": info.address, "token": token}
