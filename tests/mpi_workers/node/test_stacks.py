"""Stacks of processes, with C frames."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_workers import build_native
from mpi_workers.node.stacks import by_stack, crash_file, of_crash, of_main_thread, shown
from mpi_workers.rank import crashes
from tests.support import traces

PROGRAM = """
import ctypes, os, threading
from mpi_workers.node.processes import let_trace
let_trace(os.getppid())
threading.Thread(target=threading.Event().wait, daemon=True).start()
def routine():
    print("here", flush=True)
    ctypes.CDLL(None).sleep(60)
routine()
"""

SOLVER = """
#include <string.h>
int solver(long address) { return 2 * (int)strlen((char *)address); }
"""
HIDDEN = """\
static int bad(long *address) {
    *address += 1;
    return (int)*address; }
static int between(long *address) {
    int found =
        bad(address);
    return 2 * found; }
__attribute__((visibility("default"))) int solver(long address) {
    return between((long *)address); }
"""
CRASH = """
import ctypes, sys
from pathlib import Path
import mpi4py
mpi4py.rc.initialize = False  # a process that crashes leaves MPICH's file in /dev/shm
from mpi_workers.rank import crashes
file, frames, library = sys.argv[1:]
crashes.LIBRARY = Path(frames)
crashes.write_frames_to(file)
def routine():
    ctypes.CDLL(library).solver(8)
routine()
"""


def test_ranks_with_the_same_stack_share_a_line_after_those_with_rare_ones() -> None:
    assert by_stack({0: "a", 1: "b", 2: "a"}) == ["rank 1 is in b", "ranks 0, 2 are in a"]


def test_a_process_that_is_in_c_shows_its_c_and_python_frames() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found: list[str] = []

        def in_c() -> bool:
            found[:] = of_main_thread(process.pid)
            return any(frame.startswith(("clock_nanosleep", "nanosleep")) for frame in found)

        assert traces.wait_until(in_c, 20, 0.2) is not None, found
        names = [frame.split(" (")[0] for frame in found]
        assert names.index("sleep") < names.index("routine") < names.index("<module>")
        assert not any("ffi" in frame or "wait" in frame for frame in found)
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_is_gone_has_no_stack() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    begin = traces.clock()
    assert of_main_thread(process.pid) == []
    assert traces.clock() - begin < 10


def native(name: str, library: str) -> dict[str, object]:
    return {"name": name, "module": f"/x/{library}", "filename": "", "line": 0}


def python(name: str, file: str, line: int) -> dict[str, object]:
    return {"name": name, "module": None, "filename": file, "line": line}


def test_the_loop_of_the_rank_is_left_out() -> None:
    frames = [
        native("MPI_Recv", "libmpi.so.12"),
        native("0x7f12", "libmpi.so.12"),
        python("solve", "/home/me/lib.py", 7),
        python("execute", "/a/mpi_workers/rank/process.py", 9),
        python("main", "/home/me/run.py", 3),
    ]
    assert shown(frames) == ["MPI_Recv (libmpi.so.12)", "solve (lib.py:7)"]


def test_frames_inside_of_mpi_are_left_out_but_those_that_mpi_calls_are_not() -> None:
    barrier = [native("PMPI_Barrier", "libmpi.so.12"), native("solve", "libmine.so")]
    inside = [native("poll", "libc.so.6"), native("MPIDI_progress_test", "libmpi.so.12")]
    operation = [native("own_maximum", "libmine.so"), native("MPIR_Reduce_local", "libmpi.so.12")]
    assert shown([*inside, *barrier]) == shown(barrier)
    assert shown([*operation, *barrier])[0] == "own_maximum (libmine.so)"


def test_a_wait_in_the_layer_under_mpi_is_that_of_its_caller() -> None:
    layer = "mpi_workers/waits/mpi_waits.so"
    inside = [native("sched_yield", "libc.so.6"), native("PMPI_Iprobe", "libmpi.so.12")]
    inside += [native("meet", layer), native("MPI_Allreduce", layer)]
    caller = [native("solve", "libmine.so"), python("execute", "/a/mpi_workers/rank/process.py", 9)]
    assert shown([*inside, *caller]) == ["MPI_Allreduce (mpi_waits.so)", "solve (libmine.so)"]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_crash_in_c_leaves_its_frames(tmp_path: Path, compiled: bool) -> None:
    source, library = tmp_path / "solver.c", tmp_path / "solver.so"
    source.write_text(SOLVER)
    if why := build_native.build(source, library):
        pytest.skip(why)
    frames = tmp_path / "crash_frames.so"
    if compiled:
        build_native.build(crashes.LIBRARY.with_suffix(".c"), frames)
    file = crash_file(str(tmp_path), 3)
    done = subprocess.run(
        [sys.executable, "-c", CRASH, file, frames, library], capture_output=True, check=False
    )
    assert done.returncode == -11
    assert done.stderr == b""  # its proxy shows it, once
    found = of_crash(str(tmp_path), 3)
    assert ("solver (solver.so)" in found) == compiled, found
    assert found[-2:] == ["routine (<string>:11)", "<module> (<string>:12)"]
    assert of_crash(str(tmp_path), 4) == []


@pytest.mark.parametrize("flags", [["-g"], []])
def test_hidden_functions_have_names_and_lines_in_a_crash(tmp_path: Path, flags: list[str]) -> None:
    if shutil.which("addr2line") is None or shutil.which("cc") is None:
        pytest.skip("needs a C compiler and binutils")
    source, library, frames = (tmp_path / name for name in ("inner.c", "inner.so", "frames.so"))
    source.write_text(HIDDEN)
    subprocess.run(
        ["cc", *flags, "-shared", "-fPIC", "-fvisibility=hidden", "-o", library, source], check=True
    )
    build_native.build(crashes.LIBRARY.with_suffix(".c"), frames)
    command = [sys.executable, "-c", CRASH, crash_file(str(tmp_path), 0), frames, library]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -11
    found = of_crash(str(tmp_path), 0)
    lines = (":2", ":6") if flags else ("", "")
    assert found[:2] == [f"bad (inner.so{lines[0]})", f"between (inner.so{lines[1]})"], found
