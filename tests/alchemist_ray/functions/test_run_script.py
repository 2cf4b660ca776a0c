"""`als.run_script`: existing mpi4py scripts on a gang."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import CallTimeoutError, RoutineError
from tests.support import traces


def write(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


# As in mpi4py's tutorial: point to point, collectives, NumPy buffers, and a clean end.
TUTORIAL = """
    \"\"\"Pi by the midpoint rule.\"\"\"
    from __future__ import annotations
    import atexit, sys
    import numpy
    from mpi4py import MPI

    def compute(comm, n):
        h = 1.0 / n
        x = h * (numpy.arange(comm.rank, n, comm.size) + 0.5)
        mine = numpy.array(h * (4.0 / (1.0 + x * x)).sum())
        pi = numpy.zeros(())
        comm.Reduce([mine, MPI.DOUBLE], [pi, MPI.DOUBLE], op=MPI.SUM, root=0)
        return float(pi)

    if __name__ == "__main__":
        comm = MPI.COMM_WORLD
        rank, size = comm.Get_rank(), comm.Get_size()
        atexit.register(lambda: print("goodbye", flush=True))
        n = comm.bcast(int(sys.argv[1]) if rank == 0 else None, root=0)
        pi = compute(comm, n)
        request = comm.isend({"rank": rank}, dest=(rank + 1) % size, tag=11)
        neighbour = comm.recv(source=(rank - 1) % size, tag=11)["rank"]
        request.wait()
        halves = comm.Split(rank % 2, rank)
        print(f"neighbour {neighbour}, {halves.size} in my half")
        if rank == 0:
            print(f"pi is approximately {pi:.6f}")
        MPI.Finalize()
        sys.exit(0)
"""


def test_a_tutorials_script_runs(
    als: AlchemistSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, TUTORIAL)
    for _ in range(2):
        als.run_script(path, [100_000])
        out = capsys.readouterr().out.splitlines()
        assert "[rank 0] pi is approximately 3.141593" in out
        assert "[rank 0] neighbour 2, 2 in my half" in out
        assert "[rank 1] neighbour 0, 1 in my half" in out
        assert sum("goodbye" in line for line in out) == 3


def test_a_script_runs_as_under_mpiexec(
    als: AlchemistSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside_the_script.py").write_text("VALUE = 42\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = write(
        tmp_path,
        """
        import os, sys
        import beside_the_script
        print(__name__, __file__, sys.argv[1:], beside_the_script.VALUE, os.getcwd(),
              os.environ.get("MY_SETTING"))
        """,
    )
    als.run_script(path, ["a", 1])
    assert f"[rank 2] __main__ {path} ['a', '1'] 42 {os.getcwd()} None\n" in capsys.readouterr().out
    als.run_script(path, cwd=elsewhere, env={"MY_SETTING": 7})
    assert f"[rank 1] __main__ {path} [] 42 {elsewhere} 7\n" in capsys.readouterr().out

    def after(comm: object) -> tuple[str | None, str, bool]:
        import sys  # noqa: PLC0415

        from mpi4py import MPI  # noqa: PLC0415

        return os.environ.get("MY_SETTING"), os.getcwd(), MPI.COMM_WORLD is comm or (
            sys.modules["__main__"].__name__ != "mpi_workers.__main__"
            and str(path) in sys.argv
        )  # fmt: skip

    setting, folder, changed = als.run(after)
    assert setting is None
    assert folder != str(elsewhere)
    assert not changed


@pytest.mark.parametrize("code", ["3", "'it went wrong'"])
def test_an_exit_code_is_an_error(als: AlchemistSession, tmp_path: Path, code: str) -> None:
    path = write(
        tmp_path,
        f"""
        import sys
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            sys.exit({code})
        MPI.COMM_WORLD.Barrier()
        """,
    )
    with pytest.raises(RoutineError, match=r"script\.py exited with code .* on rank 1") as caught:
        als.run_script(path)
    assert caught.value.rank == 1
    assert caught.value.facts["exit_code"] == (3 if code == "3" else 1)


def test_a_failing_script_shows_where(als: AlchemistSession, tmp_path: Path) -> None:
    path = write(tmp_path, "from mpi4py import MPI\nx = 1 / MPI.COMM_WORLD.rank\n")
    with pytest.raises(RoutineError, match="ZeroDivisionError") as caught:
        als.run_script(path)
    assert caught.value.rank == 0
    assert f'File "{path}", line 2' in str(caught.value)
    assert "x = 1 / MPI.COMM_WORLD.rank" in str(caught.value)
    with pytest.raises(RoutineError, match="SyntaxError"):
        als.run_script(write(tmp_path, "def f(:"))


@pytest.mark.parametrize(
    "wait",
    [
        "MPI.COMM_WORLD.recv(source=MPI.ANY_SOURCE)",
        "MPI.COMM_WORLD.irecv(source=MPI.ANY_SOURCE).wait()",
        "MPI.Request.Waitall([MPI.COMM_WORLD.Irecv(bytearray(8)) for _ in range(3)])",
    ],
)
def test_a_script_that_hangs_is_cancelled(als: AlchemistSession, tmp_path: Path, wait: str) -> None:
    path = write(tmp_path, f"from mpi4py import MPI\n{wait}\n")
    start = traces.clock()
    with pytest.raises(CallTimeoutError):
        als.run_script(path, timeout_s=0.3)
    assert traces.clock() - start < 3


def test_a_script_ends_with_its_threads(
    als: AlchemistSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path,
        """
        import atexit, threading, time
        from concurrent.futures import ThreadPoolExecutor

        def work(name):
            time.sleep(0.3)
            print(name)

        atexit.register(print, "the end")
        threading.Thread(target=work, args=["thread"]).start()
        pool = ThreadPoolExecutor(1)
        pool.submit(work, "pool")
        pool.submit(work, "pool again")
        """,
    )
    als.run_script(path, timeout_s=20)
    told = capsys.readouterr().out.splitlines()
    for rank in range(3):
        mine = [line.partition("] ")[2] for line in told if line.startswith(f"[rank {rank}]")]
        assert sorted(mine[:2]) == ["pool", "thread"]
        assert mine[2:] == ["pool again", "the end"]
