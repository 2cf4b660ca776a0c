"""``%load_ext alchemist_ray``: cells on the ranks, in a real IPython shell."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alchemist_ray
from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import RoutineError
from tests.support import traces
from tests.support.kernels import Notebook, plain_shell

__all__ = ["plain_shell"]

IPython = pytest.importorskip("IPython")


@pytest.fixture
def shell(plain_shell: Any) -> Any:
    plain_shell.run_line_magic("load_ext", "alchemist_ray")
    return plain_shell


def test_a_cell_runs_on_every_rank(
    shell: Any, session: AlchemistSession, capfd: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns["als"] = session
    shell.run_cell_magic("mpi", "", "total = comm.allreduce(rank + 1)\nprint('rank', rank)\ntotal")
    shell.run_cell_magic("mpi", "", "'not shown';\n")
    out = capfd.readouterr().out
    assert "not shown" not in out
    count = len(session.list_workers())
    for rank in range(count):
        assert f"[rank {rank}] rank {rank}" in out
        assert f"[rank {rank}] {count * (count + 1) // 2}" in out


def test_variables_stay_on_the_ranks_and_travel_when_asked(
    shell: Any, session: AlchemistSession
) -> None:
    A = np.arange(12.0).reshape(6, 2)
    shell.user_ns.update(als=session, A=session.send_matrix(A), factor=3.0)
    shell.run_cell_magic("mpi", "als --put A,factor", "A.local[...] *= factor\nkept = size")
    shell.run_cell_magic("mpi", "--get A,kept,top", "top = A.local.max()")
    assert isinstance(shell.user_ns["A"], Handle)
    assert np.array_equal(shell.user_ns["A"].fetch(), 3 * A)
    assert shell.user_ns["kept"] == len(session.list_workers())
    assert shell.user_ns["top"] > 0


def test_an_error_has_the_traceback_of_the_cell(shell: Any, session: AlchemistSession) -> None:
    shell.user_ns["als"] = session
    with pytest.raises(RoutineError, match=r"(?s)%%mpi cell \d+.*1 / \(rank - rank\)") as caught:
        shell.run_cell_magic("mpi", "", "x = 2\ny = 1 / (rank - rank)")
    assert not any("gang" in str(frame.path) for frame in caught.traceback)
    number = shell.execution_count
    failed = shell.run_cell("%%mpi\n1 / 0", store_history=True).error_in_exec
    assert f"%%mpi cell {number}>" in str(failed)
    with pytest.raises(RoutineError, match="no variable absent"):
        shell.run_cell_magic("mpi", "--get absent", "x = 2")
    with pytest.raises(RoutineError, match="SyntaxError"):
        shell.run_cell_magic("mpi", "", "x = = 2")


def test_a_traceback_has_the_frames_of_the_user_only(
    shell: Any, session: AlchemistSession, capfd: pytest.CaptureFixture[str]
) -> None:
    def shown(cell: str) -> str:
        assert not shell.run_cell(cell).success
        return re.sub(r"\x1b\[[0-9;]*m", "", capfd.readouterr().out)

    shell.user_ns.update(als=session, np=np)
    for cell in (
        "als.load_matrix('/no/such.csv')",
        "als.send_matrix(np.eye(3)) @ np.ones(7)",
        "als.load_library('linalg').cholesky(als.send_matrix(-np.eye(3)))",
        "def blocks():\n    yield als.load_matrix('/no/such.csv')\n"
        "als.send_blocks(blocks(), shape=(2, 2))",
    ):
        told = shown(cell)
        assert re.search(rf"---> \d {re.escape(cell.splitlines()[-1])}\n", told), told
        assert str(Path(alchemist_ray.__file__).parent) not in told
        assert "Error: " in told
        assert len(told.splitlines()) < 25, told
        assert "blocks()" not in cell or "yield als.load_matrix" in told
    if find_spec("dask") is not None:
        shell.run_cell(
            "import dask.array as da\ndef boom(chunk):\n    raise ValueError('sensor 7 is off')\n"
            "D = da.ones((9, 2), chunks=3).map_blocks(boom, dtype=float, meta=np.empty((0, 0)))"
        )
        told = shown("als.send_matrix(D)")
        assert "TransferError: chunk (" in told
        assert ", in boom" in told
        assert len(told.splitlines()) < 25, told
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    told = shown("als.run(lambda comm: __import__('time').sleep(60))")
    timer.join()
    assert "KeyboardInterrupt" in told
    assert len(told.splitlines()) < 25, told
    told = shown("try:\n    1 / 0\nexcept ZeroDivisionError:\n    als.load_matrix('/no/such.csv')")
    assert "During handling of the above exception" in told
    assert "ZeroDivisionError: division by zero" in told


def test_what_is_missing_is_named(shell: Any, session: AlchemistSession) -> None:
    usage = IPython.core.error.UsageError
    with pytest.raises(usage, match=r"no session with workers: `%%mpi -n 4`"):
        shell.run_cell_magic("mpi", "", "1")
    shell.user_ns.update(als=session, other=AlchemistSession(1))
    try:
        with pytest.raises(usage, match="name one of the sessions als, other"):
            shell.run_cell_magic("mpi", "", "1")
        with pytest.raises(usage, match="no variable nothing"):
            shell.run_cell_magic("mpi", "als --put nothing", "1")
        with pytest.raises(usage, match="x is not an AlchemistSession"):
            shell.run_cell_magic("mpi", "x", "1")
    finally:
        shell.user_ns["other"].close()


def test_a_session_is_started_attached_and_listed(
    shell: Any, cluster: str, capfd: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell_magic("mpi", "-n 1 --get size", "size")
    started = shell.user_ns["als"]
    assert shell.user_ns["size"] == 1
    started.close()
    with AlchemistSession(1, name="by-magic"):
        shell.run_line_magic("mpi_attach", "by-magic")
        shell.run_cell_magic("mpi", "als --get size", "size")
        capfd.readouterr()
        shell.run_line_magic("mpi_status", "")
        assert "by-magic" in capfd.readouterr().out
        shell.user_ns["als"].detach()


def test_matrices_and_sessions_are_shown(shell: Any, session: AlchemistSession) -> None:
    shell.user_ns.update(als=session, A=session.send_matrix(np.eye(3), name="shown"))
    shown, _ = shell.display_formatter.format(shell.user_ns["A"])
    assert "shown" in shown["text/html"]
    shown, _ = shell.display_formatter.format(session)
    assert "workers" in shown["text/plain"]
    count = len(session.list_workers())
    for row in (f"workers</th><td>{count}, idle", "matrices</th><td>1, 72 B"):
        assert row in shown["text/html"]
    closed = AlchemistSession()
    closed.close()
    shown, _ = shell.display_formatter.format(closed)
    assert "closed" in shown["text/html"]


CELLS = (
    "%load_ext alchemist_ray",
    "%%mpi -n 2 --get size\nsize",
    "print(als.connection.address.gang, [worker.pid for worker in als.list_workers()])",
)


def test_interrupt_and_restart_of_a_kernel(cluster: str) -> None:
    notebook = Notebook(cluster)
    try:
        *_, said = map(notebook.run, CELLS)
        gang, ranks = said.split(" ", 1)
        sleeps = "%%mpi\nimport time\nprint('begun', flush=True)\ntime.sleep(600)"
        assert notebook.run(sleeps, interrupt_at="begun").endswith("KeyboardInterrupt")
        calls = "als.run(lambda comm: print('called', flush=True) or __import__('time').sleep(600))"
        assert notebook.run(calls, interrupt_at="called").endswith("KeyboardInterrupt")
        assert notebook.run(CELLS[-1]) == said  # the gang and its ranks are the same
        assert "[rank 1] 2" in notebook.run("%%mpi\nsize")
        notebook.restart()  # a private gang ends with its kernel
        pids = [int(pid) for pid in ranks.strip("[] \n").split(",")]
        assert traces.wait_until(lambda: not any(map(traces.alive, pids)), 10) is not None
        *_, said = map(notebook.run, CELLS)
        assert said.split()[0] != gang
    finally:
        notebook.close()


def test_a_notebook_that_is_opened_again_finds_the_variables_of_its_cells(cluster: str) -> None:
    """They are the ranks': its kernel was killed, and the next one attaches."""
    notebook = Notebook(cluster)
    begin = """
        %load_ext alchemist_ray
        from alchemist_ray import AlchemistSession
    """
    try:
        notebook.run(textwrap.dedent(begin))
        notebook.run('als = AlchemistSession(2, name="cells", lifetime="detached")')
        notebook.run("%%mpi\nmine = np.arange(3.0) + rank")
        notebook.run("future = als.submit(lambda comm: comm.size)")
        assert notebook.run("import os; os.kill(os.getpid(), 9)") == "killed"
        notebook.run(textwrap.dedent(begin) + "%mpi_attach cells")
        assert "[rank 1] array([1., 2., 3.])" in notebook.run("%%mpi\nmine")
        assert notebook.run("print(als.futures()[0].result(60))") == "2\n"
        notebook.run("als.stop(); AlchemistSession.stop_gang('cells')")
    finally:
        notebook.close()
