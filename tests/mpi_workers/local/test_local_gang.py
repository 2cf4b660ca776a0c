"""Gangs without Ray: their environment, and the ends of their ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpi_workers.local import local_gang
from tests.support import traces
from tests.support.commands import ROOT

RANKS = "tests.mpi_workers.local.ranks_local:"
END_LIMIT_S = 20.0


def test_ranks_have_the_environment_of_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("OF_THIS_CALL", value)
        assert local_gang.run(RANKS + "variable", 2, "OF_THIS_CALL") == [value] * 2


def test_a_killed_rank_ends_the_others_and_is_named() -> None:
    with pytest.raises(AssertionError, match="rank 2 was killed by signal 9"):
        local_gang.run(RANKS + "killed", 3)


def test_ranks_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    call = f"local_gang.run({RANKS + 'waits'!r}, 2, {str(tmp_path)!r}, timeout=100)"
    program = f"from mpi_workers.local import local_gang\n{call}"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as process:
        try:
            there = traces.wait_until(lambda: len(list(tmp_path.iterdir())) == 2, END_LIMIT_S)
        finally:
            process.kill()
    assert there is not None
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert traces.wait_until(lambda: not any(map(traces.alive, pids)), END_LIMIT_S) is not None
