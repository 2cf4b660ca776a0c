"""Rank side of `programs`: small MPI programs one after the other, each a call of a gang."""

from __future__ import annotations

import faulthandler
import importlib
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpi_workers.failures import Interrupted
from mpi_workers.rank.gang_view import GangView
from mpi_workers.waits import interruption
from mpi_workers.waits.interruption import InterruptWord, Of

VALUE, LEFT, ERROR = "value", "left", "error"  # how a call ends on a rank
RENEWED = "renewed"  # it would run in new processes, which have nothing of earlier calls


class Calls:
    """A gang without Ray, whose calls begin and end as those of a session do.

    Attributes
    ----------
    gang : GangView
    rank, size : int
    """

    def __init__(self, gang: GangView) -> None:
        self.gang = gang
        self.rank, self.size = gang.rank, gang.size
        self._word = InterruptWord(gang.folder / "interrupt")  # that of `local_rank`
        self._number = interruption.mpi_layer.state().call
        self._unsafe = ""
        with interruption.uninterruptible():
            self._own = gang.world.Dup()

    @property
    def comm(self) -> MPI.Intracomm:
        """That of the call."""
        return self.gang.comm

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run ``function(comm, *arguments)`` as one call: how it ended on this rank, and with what.

        A rank on which it raises ends the call on all others. No call follows one after which the
        ranks' processes have to be renewed, because it has left something that cannot be ended.
        """
        if self._unsafe:
            return [RENEWED, self._unsafe]
        self._number += 1
        interruption.begin(self._number)
        try:
            with interruption.EndedWaits():
                outcome = [VALUE, function(self.comm, *arguments)]
        except Interrupted as interrupted:
            outcome = [LEFT, interruption.place(interrupted)]
        except Exception as error:
            self._word.raise_to(self._number)
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcome = [ERROR, f"{type(error).__name__}: {error} ({where.name}:{where.lineno})"]
        used = interruption.has_used_communicators(but=Of.PRODUCT)
        kept = interruption.has_used_communicators(but=Of.GANG)
        self.gang.end_call(succeeded=outcome[0] == VALUE)
        failed = any(how != VALUE for how in self.together(outcome[0]))
        if failed and kept:
            interruption.mark_unsafe("a call that failed has used communicators that are kept")
        self._unsafe = next(filter(None, self.together(interruption.unsafe())), "")
        self._number += 1
        interruption.begin(self._number)
        if any(self.together(used)):
            self.gang.settle()
        if failed:
            self.gang.renew()
        else:
            self.gang.enter()
        return outcome

    def forget(self) -> None:
        """Go on in these processes with another program: what was left has its memory."""
        self._unsafe, interruption.mpi_layer.state().unsafe = "", None

    def together(self, value: Any) -> list[Any]:
        """The values of all ranks, by messages that are no call's."""
        with interruption.uninterruptible():
            return self._own.allgather(value)


def each(
    gang: GangView, module: str, names: list[str], folder: str, limit_s: float, arguments: list[Any]
) -> None:
    """Run programs. Each one's outcome is a line of this rank's file."""
    programs = importlib.import_module(module).PROGRAMS
    calls = Calls(gang)
    with open(Path(folder, str(gang.rank)), "w") as file:
        for name in names:
            faulthandler.dump_traceback_later(limit_s, exit=True)
            try:
                outcome = [VALUE, programs[name](calls, *arguments)]
            except Exception:
                outcome = [ERROR, traceback.format_exc()]
            print(json.dumps([name, outcome]), file=file, flush=True)
            calls.together(None)  # a rank that has failed ends no other
            calls.forget()
        faulthandler.cancel_dump_traceback_later()
