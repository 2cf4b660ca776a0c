"""A gang for a moment, without Ray: a function on real MPI ranks, and what rank 0 says of it.

For tests of code that runs on ranks::

    found = trial.run("tests.ali.ranks_linalg:accuracy", 3, "float64")

The function gets a real `Gang` and the arguments, and returns what JSON can hold. An
exception on any rank is an AssertionError with the output of all of them. Every run has
a time limit, shows the stacks of ranks that hang, and leaves nothing behind.

The program of a rank is ``python -m mpi_workers trial module:function '["float64"]' folder
seconds``, started by the mpiexec beside this Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

TAIL = 6000  # characters of the ranks' output in a failure
PR_SET_PDEATHSIG = 1


def run(function: str, ranks: int, *arguments: Any, timeout: float = 60.0) -> Any:
    """Run ``module:function`` on `ranks` MPI ranks.

    Parameters
    ----------
    function : str
        ``"module:name"`` of ``f(gang, *arguments)``.
    ranks : int
        How many.
    *arguments
        What JSON can hold.
    timeout : float
        Seconds; then all ranks are killed.

    Returns
    -------
    object
        What the function returned on rank 0.

    Raises
    ------
    AssertionError
        If a rank failed or time ran out; its message ends with the ranks' output.
    """
    mpiexec = Path(sys.executable).parent / "mpiexec"
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        command = [mpiexec, "-n", ranks, sys.executable, "-m", "mpi_workers", "trial"]
        command += [function, json.dumps(arguments), folder, timeout]
        process = subprocess.Popen(
            list(map(str, command)),
            env=_environment(ranks),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout + 1)
            what = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            _kill(process.pid, folder)
            output, _ = process.communicate()
            what = f"over {timeout} s"
        finally:
            _kill(process.pid, folder)
        # Not mpiexec's exit code: ranks leave without MPI_Finalize, and hydra may take the
        # first to go for a crash and kill the rest.
        done = len(list(Path(folder).glob("done*")))
        if done != ranks:
            raise AssertionError(
                f"{function} on {ranks} ranks: {what}, {done} done\n{output[-TAIL:]}"
            )
        return json.loads(Path(folder, "result.json").read_text())


def _environment(ranks: int) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYDI", "MPI"))}
    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    env["OPENBLAS_NUM_THREADS"] = env["OMP_NUM_THREADS"] = "1"
    if _crowded(ranks):
        env["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
    return env


def _crowded(ranks: int) -> bool:
    return ranks > len(os.sched_getaffinity(0))


def _kill(mpiexec: int, folder: str) -> None:
    """Kill whatever of a run is still there: hydra gives every rank a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(mpiexec, signal.SIGKILL)
    for path in Path(folder).glob("rank*.json"):
        about = json.loads(path.read_text())
        with contextlib.suppress(OSError):
            if folder.encode() in Path(f"/proc/{about['pid']}/cmdline").read_bytes():
                os.kill(about["pid"], signal.SIGKILL)
        for segment in about["segments"]:
            Path(segment).unlink(missing_ok=True)


_word: Any = None


def interrupt(call: int) -> None:
    """In a rank: end every call up to this one, as a failure on another rank would."""
    _word.raise_to(call)


def begin(call: int) -> None:
    """In a rank: waits from now on belong to this call."""
    from mpi_workers.rank import communicator  # noqa: PLC0415 - it initialises MPI

    communicator.begin(call)


def main(argv: list[str]) -> None:
    """The program of a rank. Does not return."""
    try:
        _rank(*argv)
        status = 0
    except BaseException:
        print(f"rank {os.environ.get('PMI_RANK', '?')}:\n{traceback.format_exc()}", flush=True)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not MPI_Finalize: calls that a test gave up would keep it


def _rank(function: str, arguments: str, folder: str, timeout: str) -> None:
    global _word
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(timeout))

    from mpi4py import MPI  # noqa: PLC0415 - only ranks may initialise MPI

    from mpi_workers.matrix.memory import Pool  # noqa: PLC0415
    from mpi_workers.matrix.storage import Storage  # noqa: PLC0415
    from mpi_workers.rank import communicator  # noqa: PLC0415
    from mpi_workers.rank.interruption import InterruptWord  # noqa: PLC0415
    from mpi_workers.rank.loop import Gang  # noqa: PLC0415

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    world = MPI.COMM_WORLD
    segments = set(re.findall(r"/dev/shm/mpich\S+", Path("/proc/self/maps").read_text()))
    about = {"pid": os.getpid(), "segments": sorted(segments)}
    Path(folder, f"rank{world.rank}.json").write_text(json.dumps(about))
    _word = InterruptWord(Path(folder, "interrupt"))
    communicator.watch(_word, crowded=_crowded(world.size))
    communicator.begin(1)
    gang = Gang(world, Storage(world.rank, Pool(256 << 20, shared=True)), lambda *_: None)
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(gang, *json.loads(arguments))
    if world.rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    Path(folder, f"done{world.rank}").touch()
    world.Barrier()  # nobody leaves before all are done
