"""The elements that an operation on two matrices moves: the result of `Handle.plan`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperandPlacement:
    """Where an operation on A and B takes place, as the ranks decide it.

    Attributes
    ----------
    op : str
    layout : str
        Of the result.
    operands : (str, str)
        The layouts in which A and B are taken.
    moved_nbytes : (int, int)
        Bytes that the busiest rank receives to have A and B in those layouts.
    way : str
        Of a product ``"rows"``, ``"cols"``, ``"inner"`` or ``"grid"``: what stays where it is
        (ali/linalg/gemm.py); what moves further, in panels, is not counted here.
    """

    op: str
    layout: str
    operands: tuple[str, str]
    moved_nbytes: tuple[int, int]
    way: str
