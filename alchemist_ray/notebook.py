"""Magics for IPython and Jupyter: ``%load_ext alchemist_ray``."""

from __future__ import annotations

import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser

from alchemist_ray.errors import AlchemistError
from alchemist_ray.observe.status import status, table
from alchemist_ray.session.alchemist_session import AlchemistSession
from alchemist_ray.subcommands import names
from mpi_workers.rank.cells import run_cell

SESSION = "als"  # the variable of sessions that magics open


@magics_class
class AlchemistMagics(Magics):
    """``%%mpi``, ``%mpi_attach`` and ``%mpi_status``."""

    shell: Any

    @cell_magic
    def mpi(self, line: str, cell: str) -> None:
        """Run the cell on every rank: ``%%mpi [SESSION] [-n WORKERS] [--put A,b] [--get C]``.

        SESSION is the variable of a session, by default the only one there is; ``-n`` starts one.
        ``comm``, ``rank``, ``size`` and ``np`` are there, and the variables of earlier cells. What
        the ranks print, and the value of the last expression, is shown with the rank. A handle
        that is ``--put`` is the rank's part of the matrix (`ali.DistMatrix`); a DistMatrix that
        comes back with ``--get`` is a handle. Interrupting the kernel ends the cell, not the gang.
        """
        asked = _parser().parse_argstring(line)
        session = self._session(asked.session, asked.workers)
        space = self.shell.user_ns
        sent = names(asked.put)
        if absent := [name for name in sent if name not in space]:
            raise UsageError(f"%%mpi --put: there is no variable {', '.join(absent)}")
        given = {name: space[name] for name in sent}
        number = self.shell.displayhook.prompt_count  # execution_count may be the next cell's
        try:
            results = session.run(run_cell, cell, number, given, names(asked.get))
        except AlchemistError as error:  # frames of this package tell nothing of the cell
            raise error.with_traceback(None) from None
        space.update(results)

    @line_magic
    def mpi_attach(self, line: str) -> AlchemistSession:
        """``%mpi_attach NAME [VARIABLE]``: attach to a gang; the session is ``als``."""
        words = shlex.split(line)
        if len(words) not in (1, 2):
            raise UsageError("%mpi_attach NAME [VARIABLE]; %mpi_status lists the gangs")
        session: AlchemistSession = AlchemistSession.attach(words[0])
        self.shell.user_ns[words[1] if len(words) == 2 else SESSION] = session
        return session

    @line_magic
    def mpi_status(self, line: str) -> None:
        """``%mpi_status``: the gangs of the Ray cluster, as `alchemist status` lists them."""
        if line.strip():
            raise UsageError("%mpi_status takes no arguments")
        print(table(status()), end="")

    def _session(self, name: str | None, workers: int | None) -> AlchemistSession:
        space = self.shell.user_ns
        if name is not None:
            if not isinstance(space.get(name), AlchemistSession):
                raise UsageError(f"%%mpi: {name} is not an AlchemistSession")
            found: AlchemistSession = space[name]
            return found
        sessions = {
            variable: value
            for variable, value in space.items()
            if isinstance(value, AlchemistSession)
            and value.has_workers
            and not variable.startswith("_")
        }
        if len(set(sessions.values())) > 1:
            raise UsageError(f"%%mpi: name one of the sessions {', '.join(sorted(sessions))}")
        if sessions:
            return next(iter(sessions.values()))
        if workers is None:
            raise UsageError(
                "%%mpi: there is no session with workers: `%%mpi -n 4` starts one, or "
                "als = AlchemistSession(4)"
            )
        space[SESSION] = started = AlchemistSession(workers)
        return started


def _parser() -> MagicArgumentParser:
    parser = MagicArgumentParser(prog="%%mpi", add_help=False)
    add = parser.add_argument
    add("session", nargs="?", help="variable of the session (default: the only session)")
    add("-n", "--workers", type=int, help="number of ranks to start if there is no session")
    add("--put", default="", help="variables to copy to the ranks: A,b (handles become parts)")
    add("--get", default="", help="variables to copy from rank 0: C,total")
    return parser


def register(shell: Any) -> None:
    """Add the magics to an IPython shell."""
    shell.register_magics(AlchemistMagics)
