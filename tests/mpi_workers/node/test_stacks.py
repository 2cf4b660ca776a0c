"""Stacks of processes, with C frames."""

from __future__ import annotations

import subprocess
import sys
import time

from mpi_workers.node.stacks import of_main_thread, shown
from tests.support import traces

PROGRAM = """
import ctypes, os, threading
from mpi_workers.node.process_control import let_trace
let_trace(os.getppid())
threading.Thread(target=threading.Event().wait, daemon=True).start()
def routine():
    print("here", flush=True)
    ctypes.CDLL(None).sleep(60)
routine()
"""


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
    begin = time.monotonic()
    assert of_main_thread(process.pid) == []
    assert time.monotonic() - begin < 10


def test_the_loop_of_the_rank_is_left_out() -> None:
    frames = [
        {"name": "MPI_Recv", "module": "/x/libmpi.so.12", "filename": "", "line": 0},
        {"name": "0x7f12", "module": "/x/libmpi.so.12", "filename": "", "line": 0},
        {"name": "solve", "module": None, "filename": "/home/me/lib.py", "line": 7},
        {"name": "execute", "module": None, "filename": "/a/mpi_workers/rank/loop.py", "line": 9},
        {"name": "main", "module": None, "filename": "/home/me/run.py", "line": 3},
    ]
    assert shown(frames) == ["MPI_Recv (libmpi.so.12)", "solve (lib.py:7)"]
