"""Owners of a dispatcher and of nodes, which note what they are told."""

from __future__ import annotations

from typing import Any

from alchemist_ray.errors import AlchemistError
from alchemist_ray.runtime.commands.nodes import Nodes


class Owner:
    """Of a dispatcher. Its gang is not started again.

    Attributes
    ----------
    losses : list of AlchemistError
        Of ranks.
    """

    def __init__(self) -> None:
        self.losses: list[AlchemistError] = []

    def ranks_lost(self, error: AlchemistError) -> None:
        self.losses.append(error)

    def nodes_lost(self, error: AlchemistError) -> bool:
        return False

    def node_leaving(self, nodes: Nodes, error: AlchemistError) -> bool:
        return False

    def orphaned(self) -> None:
        """Nothing follows."""


class NodesOwner:
    """Of nodes.

    Attributes
    ----------
    losses : list of AlchemistError
        Of ranks, and of nodes.
    """

    def __init__(self) -> None:
        self.losses: list[AlchemistError] = []

    def ranks_lost(self, nodes: Nodes, error: AlchemistError) -> None:
        self.losses.append(error)

    def nodes_lost(self, nodes: Nodes, error: AlchemistError) -> None:
        self.losses.append(error)

    def node_leaving(self, nodes: Nodes, error: AlchemistError) -> bool:
        return False

    def refusal(self, nodes: Nodes) -> None:
        """No command runs."""

    def show_progress(self, seq: int, fraction: float, text: str) -> None:
        """Nothing is shown."""

    def show_output(self, seq: int, lines: Any) -> None:
        """Nothing is shown."""
