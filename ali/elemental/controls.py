"""Elemental's control structures, as its C interface takes them (include/El/*.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_int, c_void_p
from typing import Any

CType = Any  # a ctypes type

_made: dict[tuple[str, CType, CType], type[ctypes.Structure]] = {}


def control(name: str, real: CType, integer: CType) -> type[ctypes.Structure]:
    """The structure ``El<name>Ctrl_{s,d}``.

    Parameters
    ----------
    name : str
        ``QR``, ``RPCA`` or ``NNLS`` (or one that those contain).
    real : ctypes type
        c_float or c_double.
    integer : ctypes type
        The type of ElInt in this libEl.
    """
    key = (name, real, integer)
    if key not in _made:
        fields = {"real": real, "int": integer, "bool": c_bool, "enum": c_int, "rule": c_void_p}
        layout = []
        for line in _LAYOUTS[name]:
            kind, *members = line.split()
            layout += [(m, fields.get(kind) or control(kind, real, integer)) for m in members]
        _made[key] = type(f"El{name}Ctrl", (ctypes.Structure,), {"_fields_": layout})
    return _made[key]


_LAYOUTS = {
    "QR": [
        "bool colPiv boundRank",
        "int maxRank",
        "bool adaptive",
        "real tol",
        "bool alwaysRecomputeNorms smallestFirst",
    ],
    "RPCA": [
        "bool useALM usePivQR progress",
        "int numPivSteps maxIts",
        "real tau beta rho tol",
    ],
    "RegSolve": [
        "enum alg",
        "real relTol relTolRefine",
        "int maxIts maxRefineIts restart",
        "bool progress time",
    ],
    "Mehrotra": [
        "bool primalInit dualInit",
        "real minTol targetTol",
        "int maxIts",
        "real maxStepRatio",
        "enum system",
        "bool mehrotra",
        "rule centralityRule",
        "bool standardInitShift",
        "real balanceTol",
        "bool forceSameStep",
        "RegSolve solveCtrl",
        "bool resolveReg outerEquil",
        "int basisSize",
        "bool print time",
        "real wSafeMaxNorm wMaxLimit ruizEquilTol",
        "int ruizMaxIter",
        "real diagEquilTol",
        "bool checkResiduals",
        "real reg0Tmp reg1Tmp reg2Tmp reg0Perm reg1Perm reg2Perm",
    ],
    "ADMM": ["real rho alpha", "int maxIter", "real absTol relTol", "bool inv print"],
    "Conic": ["enum approach", "Mehrotra mehrotraCtrl"],
    "NNLS": ["enum approach", "ADMM admmCtrl", "Conic qpCtrl socpCtrl"],
}
