"""`als.run_program`: an MPI executable on the ranks of a gang."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alchemist_ray.arguments import checked_mapping, checked_path
from alchemist_ray.arrays.handle import Handle
from alchemist_ray.errors import BadArgumentError
from alchemist_ray.functions.run import process_settings, run_task, words_of
from alchemist_ray.gang.libraries import checked_timeout
from alchemist_ray.gang.matrix_ref import MatrixRef
from alchemist_ray.gang.owner import GangOwner


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program has ended.

    Attributes
    ----------
    exit_codes : list of int
        One per rank.
    matrices : dict of str to Handle
        The matrices that it has created with ``alchemist_client.h``.
    """

    exit_codes: list[int]
    matrices: dict[str, Handle]


class SessionPrograms(GangOwner):
    """Runs executables on the gang of a session."""

    def run_program(
        self,
        argv: Sequence[Any],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | os.PathLike[str] | None = None,
        matrices: Mapping[str, Handle] | None = None,
        check: bool = True,
        timeout_s: float | None = None,
    ) -> ProgramResult:
        """Run an MPI executable with one process per rank, like ``mpiexec argv``.

        The processes run on the nodes and CPUs of the gang's ranks, and find each other through
        PMI: any program of MPICH or its relatives (Intel MPI, Cray MPICH, MVAPICH). A program of
        Open MPI is started by its own mpirun where that is installed, for gangs on one node.
        Lines that it prints appear here at once, with their rank.

        Parameters
        ----------
        argv : sequence
            The executable and its arguments; each is converted to a string. The executable must be
            on every node of the gang: a path (relative to `cwd`) or a name on the PATH there.
        cwd : path_like, optional
            Working directory. Default: that of this process, if it exists on the node.
        env : mapping, optional
            Environment variables to add.
        stdin : bytes, str or path_like, optional
            Standard input of rank 0: bytes, text, or a file of this process as a `Path`. The
            others read an empty one.
        matrices : mapping of str to Handle, optional
            Matrices that the program may attach to, read and change (``alchemist_client.h``).
        check : bool
            Whether an exit code other than 0 is an error.
        timeout_s : float, optional
            As in `run`.

        Returns
        -------
        ProgramResult

        Raises
        ------
        BadArgumentError
            If `argv` is not a list, or the program cannot be started on a node.
        RoutineError
            If it exits with a code other than 0 (``facts["exit_code"]``), is killed by a signal,
            calls MPI_Abort, or ends on some ranks while others wait in MPI_Init or MPI_Finalize.
        CallTimeoutError, CancelledError, GroupFailedError
            As in `run`. The processes and their children have ended then.

        Notes
        -----
        Costs about 10 ms, and the start of the program.
        """
        limit_s = checked_timeout(timeout_s)
        words = words_of(argv)
        if not words:
            raise BadArgumentError("argv=[]: the first element names the program")
        uses: dict[str, int] = {}
        for name, handle in checked_mapping("matrices", matrices, "names and handles").items():
            if not isinstance(handle, MatrixRef):
                raise BadArgumentError(
                    f"matrices[{name!r}] is a {type(handle).__name__}: it must be a handle; "
                    "als.send_matrix makes one of an array"
                )
            uses[str(name)] = self.connection.argument(handle)
        task = {
            "kind": "program",
            "name": os.path.basename(words[0]),
            "argv": words,
            "check": check,
            "matrices": uses,
            "given": _input(stdin) and [_input(stdin)],
            **process_settings(cwd, env),
        }
        used = sorted(set(uses.values()))
        found = run_task(self.connection, task, used, limit_s)
        return ProgramResult(found["exit_codes"], found["matrices"])


def _input(stdin: bytes | str | os.PathLike[str] | None) -> bytes | None:
    if stdin is None or isinstance(stdin, bytes):
        return stdin
    if isinstance(stdin, str):
        return stdin.encode()
    try:
        return checked_path("stdin", stdin).read_bytes()
    except OSError as error:
        raise BadArgumentError(f"run_program cannot read {stdin}: {error.strerror}") from error
