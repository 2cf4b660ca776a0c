"""`alchemist run-routine`: a routine on MPI ranks without Ray."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import build, commands, traces

LIBRARY = """
import os
from ali import Context, DistMatrix, routine

@routine("B", "ranks", "mark")
def scale(ctx: Context, A: DistMatrix, factor: float = 2.0) -> tuple[DistMatrix, int, str]:
    B = ctx.empty_like(A)
    B.local[...] = factor * A.local
    return B, ctx.size, os.environ.get("MARK", "none")

@routine("z", "zs")
def turn(ctx: Context, z: complex, zs: list[complex]) -> tuple[complex, list[complex]]:
    return 1j * z, zs

@routine(writes=("A", "B"))
def double(ctx: Context, A: DistMatrix, B: DistMatrix | None = None) -> None:
    A.local[...] *= 2

@routine()
def fail(ctx: Context) -> None:
    if ctx.rank == 1:
        raise ValueError("as asked")
    ctx.comm.Barrier()
"""
CRASHING = """
import ctypes
from ali import Context, routine

@routine()
def solve(ctx: Context) -> None:
    ctypes.CDLL(None).strlen(ctypes.c_void_p(8))
"""
HANGING = """
import os, time
from ali import Context, routine

@routine()
def wait(ctx: Context) -> None:
    print("rank", os.getpid(), flush=True)
    time.sleep(600)
"""
SOLVER = """
#include <alchemist.h>
static int solve(alchemist_call *call, const alchemist_value *in, alchemist_value *out) {
    (void)call, (void)in, (void)out;
    return ALCHEMIST_OK;
}
static const alchemist_routine routines[] = {{.name = "solve", .doc = "None.", .run = solve}, {0}};
ALCHEMIST_LIBRARY("solver", "Solves nothing.", routines)
"""
DOCS = Path(__file__).parents[2] / "docs" / "debugging.md"
VALUES = np.arange(6.0).reshape(3, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mylib.py").write_text(LIBRARY)
    np.save(tmp_path / "A.npy", VALUES)
    return tmp_path


def run(folder: Path, *words: str, code: int = 0) -> str:
    return build.run(sys.executable, "-m", "ali", "run-routine", *words, cwd=folder, code=code)


def test_matrices_are_files_and_results_are_printed_and_saved(folder: Path) -> None:
    words = ("A.npy", "factor=3", "--ranks", "3", "--layout", "MC_MR", "--out", "results")
    said = run(folder, "mylib.py", "scale", *words)
    assert "B: float64 (3, 2), MC_MR" in said
    assert "ranks = 3" in said
    np.testing.assert_array_equal(np.load(folder / "results" / "B.npy"), 3 * VALUES)
    assert "norm = " in run(folder, "linalg", "norm", "A.npy")


def test_matrices_that_a_routine_changes_are_results_too(folder: Path) -> None:
    said = run(folder, "mylib.py", "double", "A.npy", "--out", "results")
    assert "A: float64 (3, 2), VC_STAR" in said
    assert np.array_equal(np.load(folder / "results" / "A.npy"), 2 * VALUES)
    assert np.array_equal(np.load(folder / "A.npy"), VALUES)


def test_files_without_numbers_are_told(folder: Path) -> None:
    np.save(folder / "words.npy", np.array(["a", None], object))
    (folder / "short.npy").write_bytes(b"")
    for name, words in (("words", "Python objects in dtype"), ("short", "")):
        said = run(folder, "linalg", "norm", f"{name}.npy", code=1)
        assert re.search(rf"BadArgumentError: .*{name}\.npy: .*{words}", said)


def test_complex_numbers_are_pairs_or_words(folder: Path) -> None:
    said = run(folder, "mylib.py", "turn", "[1, -2]", 'zs=["2+1j", [0, 1], 3]')
    assert "z = (2+1j)\nzs = [(2+1j), 1j, (3+0j)]" in said
    assert "z = (-1+0j)" in run(folder, "mylib.py", "turn", "z=1j", "zs=[]")


def test_each_rank_starts_under_a_command(folder: Path) -> None:
    said = run(folder, "mylib.py", "scale", "A=A.npy", "--under", "env MARK=seen")
    assert "mark = 'seen'" in said


def test_ranks_that_hang_print_their_stacks(folder: Path) -> None:
    (folder / "hanging.py").write_text(HANGING)
    said = run(folder, "hanging.py", "wait", "--timeout", "4", code=1)
    wanted = r"ranks 0, 1 are in .*wait \(hanging.py:8\)|rank 1:\n(.*\n)+.* in wait\n"
    assert re.search(wanted, said), said


@build.needs_compiler
def test_ranks_that_hang_in_c_print_their_frames_by_rank(folder: Path) -> None:
    source = Path(__file__).with_name("native") / "hanging.c"
    build.shared_object(source, folder / "libhanging.so")
    said = run(folder, "libhanging.so", "meet", "--ranks", "3", "--timeout", "4", code=1)
    if " is in " not in said:
        assert re.search(r"rank 1:\nTimeout", said)
        pytest.skip("py-spy may not read other processes here")
    assert re.search(r"rank 1 is in .*sulk \(libhanging.so\)", said), said
    assert (
        "\nranks 0, 2 are in " in said
    )  # of the layer under MPI py-spy shows the innermost frames


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_ends_its_ranks(folder: Path, number: signal.Signals) -> None:
    (folder / "hanging.py").write_text(HANGING)
    (folder / "tmp").mkdir()
    words = [sys.executable, "-m", "alchemist_ray.cli", "run-routine", "hanging.py", "wait"]
    env = os.environ | {"TMPDIR": str(folder / "tmp")}
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True, env=env) as command:
        ranks = [int(command.stdout.readline().rpartition(" ")[2]) for _ in range(2)]
        command.send_signal(number)
        killed = number == signal.SIGKILL
        assert command.wait(20) == (-number if killed else 128 + number)
    try:
        assert traces.wait_until(lambda: not any(map(_runs, ranks)), 10, 0.05) is not None
        assert killed or not list((folder / "tmp").glob("ranks-*"))
    finally:
        for rank in filter(_runs, ranks):
            os.kill(rank, signal.SIGKILL)


def _runs(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()


@pytest.fixture(autouse=True)
def tools_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """py-spy is next to Python, as in an environment that is active."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def documented(tool: str) -> list[str]:
    """The options of a line of docs/debugging.md."""
    program = re.split(r"[, ]", tool)[0]
    if shutil.which(program) is None:
        pytest.skip(f"no {program}")
    return shlex.split(documented_line(tool))


def documented_line(tool: str) -> str:
    (line,) = re.findall(
        rf"^\| {tool}.*? \| `alchemist run-routine \.\.\. (.+)` \|$", DOCS.read_text(), re.M
    )
    return str(line)


def test_gdb_shows_the_stack_of_a_crash(folder: Path) -> None:
    (folder / "crashing.py").write_text(CRASHING)
    words = documented("gdb, the stack of a crash")
    said = run(folder, "crashing.py", "solve", "--ranks", "1", *words, code=1)
    assert "SIGSEGV" in said
    assert re.search(r"^#\d+ .*\bffi_call\b", said, re.M), said


@build.needs_compiler
def test_gdb_stops_in_a_function_of_a_library_in_c(folder: Path) -> None:
    (folder / "solver.c").write_text(SOLVER)
    build.shared_object(folder / "solver.c", folder / "libsolver.so")
    words = documented("gdb, a breakpoint")
    said = run(folder, "libsolver.so", "solve", "--ranks", "1", "--timeout", "90", *words, code=1)
    assert re.search(r"^#0 .*\bsolve\b", said, re.M), said


@build.needs_compiler
def test_address_sanitizer_finds_a_write_behind_an_array(folder: Path) -> None:
    text = SOLVER.replace("(void)call,", "volatile char *x = malloc(8); x[8 + call->rank] = 1;")
    (folder / "solver.c").write_text(text)
    build.shared_object(folder / "solver.c", folder / "libsolver.so", *build.ADDRESS_SANITIZER)
    line = f"run-routine libsolver.so solve --ranks 1 {documented_line('AddressSanitizer')}"
    said = build.run("sh", "-c", f"exec {sys.executable} -m ali {line}", cwd=folder, code=1)
    assert "AddressSanitizer: heap-buffer-overflow" in said
    assert "solver.c" in said


@pytest.mark.parametrize(
    ("tool", "files"),
    [
        ("py-spy, Python and C frames", {"profile.0.svg", "profile.1.svg"}),
        ("perf, a file per rank", {"perf.0.data", "perf.1.data"}),
        ("valgrind", {"valgrind.*.txt"}),
    ],
)
def test_tools_write_a_file_for_each_rank(folder: Path, tool: str, files: set[str]) -> None:
    words = documented(tool)
    if (
        tool.startswith("perf")
        and commands.run("perf", "record", "-o", "/dev/null", "true").returncode
    ):
        pytest.skip("perf may not record here (perf_event_paranoid)")
    ranks = "1" if tool == "valgrind" else "2"  # a rank takes long there
    run(folder, "mylib.py", "scale", "A.npy", "--ranks", ranks, *words)
    assert [name for name in files if not list(folder.glob(name))] == []


def test_errors_name_the_rank_and_the_cause(folder: Path) -> None:
    said = run(folder, "mylib.py", "fail", "--timeout", "20", code=1)
    assert "rank 1:\nTraceback" in said
    assert "ValueError: as asked" in said
    for wrong, words in (
        (("scale", "3"), "'A' to be of type matrix, not 3; give a .npy file"),
        (("nothing",), "has no routine 'nothing'; it has double, fail, scale, turn"),
        (("scale", "B.npy"), "there is no file B.npy"),
        (("fail", "--ranks", "0"), "--ranks 0: it must be at least 1"),
    ):
        assert words in run(folder, "mylib.py", *wrong, code=1)
