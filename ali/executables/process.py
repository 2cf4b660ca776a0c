"""The process of an MPI program on one rank: what may be started, how it is started and ended."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from ali.loader import MPI_NAME, OPEN_MPI_VERSIONS, mpi_file, searched
from mpi_workers.failures import Failure

END_TIMEOUT_S = 5.0  # for a program to end after its input was closed
LEAVE_S = 2.0  # from SIGTERM to SIGKILL
REAP_S = 10.0  # a process that waits for a dead disk or device cannot be killed
# Of a launcher that has started the ranks: the program would take itself for one of them.
DROPPED = ("PMI_", "PMIX", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPIEXEC_", "PALS_")
SHOWN = 4000  # last characters of a program's standard error in a failure
MPIRUN_OPTIONS = ("--oversubscribe", "--bind-to", "none")


def working_folder(task: dict[str, Any], rank: int) -> str | None:
    """The folder that the caller named, or the caller's own if it exists here.

    Raises
    ------
    Failure
        RoutineError, if the caller named one that this node does not have.
    """
    folder: str | None = task["cwd"]
    if folder is None or os.path.isdir(folder):
        return folder
    if not task["cwd_needed"]:
        return None
    raise Failure(
        "RoutineError",
        f"{task['name']}: rank {rank} on {os.uname().nodename} cannot work in {folder}: its "
        "node has no such folder",
        rank=rank,
    )


def located(task: dict[str, Any], env: dict[str, str], folder: str | None, rank: int) -> Path:
    """The file of the program on this node.

    Raises
    ------
    Failure
        BadArgumentError, if it does not exist here, or cannot be executed.
    """
    name = task["argv"][0]
    file = os.path.join(folder or "", name) if "/" in name else name
    found = shutil.which(file, path=env.get("PATH"))
    if found is not None:
        return Path(found).absolute()
    node = os.uname().nodename
    problem = (
        "is not executable: chmod +x, or start its interpreter"
        if os.path.isfile(file)
        else "does not exist there: install it on all nodes, or in a folder that they share"
        if "/" in name
        else "is not on the PATH there: give its path"
    )
    raise Failure("BadArgumentError", f"program {name!r} on {node} (rank {rank}) {problem}")


def mpi_of(file: Path) -> tuple[str, Path | None]:
    """The MPI library that a program needs, or "", and the file that the loader takes for it."""
    for (*_, name), found in searched(file):
        if MPI_NAME.fullmatch(name):
            return name, found
    return "", None


def is_open_mpi(library: str) -> bool:
    """Whether an MPI library of this name is Open MPI's."""
    found = MPI_NAME.fullmatch(library)
    return found is not None and int(found[2]) in OPEN_MPI_VERSIONS


def runs_open_mpi(pid: int) -> bool:
    """Whether a process has initialised Open MPI: it has loaded the component for messages."""
    with contextlib.suppress(OSError):
        return "/mca_pml_" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return False


def with_gangs_mpi(env: dict[str, str]) -> dict[str, str]:
    """The environment in which the loader also finds the MPI of the gang."""
    folders = [env.get("LD_LIBRARY_PATH"), os.path.dirname(mpi_file())]
    return env | {"LD_LIBRARY_PATH": ":".join(filter(None, folders))}


def showing_waits(env: dict[str, str], file: Path, variables: dict[str, str]) -> dict[str, str]:
    """The environment of an MPI program with those of `Gang.program_variables`."""
    # Of AddressSanitizer, which ends a program that loads another library first.
    if not variables or any("libasan" in chain[-1] for chain, _ in searched(file)):
        return env
    preloaded = filter(None, [env.get("LD_PRELOAD"), variables["LD_PRELOAD"]])
    return env | variables | {"LD_PRELOAD": ":".join(preloaded)}


def mpirun_command(file: Path, library: str, task: dict[str, Any], counts: list[int]) -> list[str]:
    """The command that starts a program of Open MPI on the ranks of one node.

    Raises
    ------
    Failure
        BadArgumentError, if the gang has several nodes, or there is no mpirun of Open MPI.
    """
    name = task["argv"][0]
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)  # the first is MPICH's
    names = ("mpirun.openmpi", "prterun", "mpirun")
    found = (shutil.which(each, path=folder) for each in names for folder in folders)
    mpirun = next(filter(_is_open_mpi, filter(None, found)), None)
    if len(counts) > 1 or mpirun is None:
        raise Failure(
            "BadArgumentError",
            f"program {name!r} is linked to Open MPI ({library}), and the gang starts programs by "
            "PMI-1, which MPICH and its relatives (Intel MPI, Cray MPICH, MVAPICH) speak. Open "
            "MPI's own mpirun is used for gangs on one node where it is on the PATH. Build the "
            "program with the gang's compiler, `python -m ali mpicc`",
        )
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    ranks = str(sum(counts))
    return [mpirun, *as_root, *MPIRUN_OPTIONS, "-n", ranks, str(file), *task["argv"][1:]]


def _is_open_mpi(mpirun: str) -> bool:
    said = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=10, check=False
    )
    return re.search("Open MPI|OpenRTE|prte", said.stdout) is not None


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program: that of the rank, without the variables of its launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return kept | dict(added)


def end_of(errors: IO[bytes]) -> str:
    """The end of a program's standard error in a file, to be appended to a message."""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - SHOWN))
    said = errors.read().decode(errors="replace").strip()
    return f": {said}" if said else ""


class Child:
    """A started program.

    Parameters
    ----------
    stdin, stdout, stderr : int or None
        As for `subprocess.Popen`.
    sockets : tuple of socket
        The program inherits them.

    Attributes
    ----------
    pid : int
    pidfd : int
        Readable when it has ended.
    """

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        cwd: str | None,
        sockets: tuple[socket.socket, ...],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr,
            pass_fds=[end.fileno() for end in sockets],
            start_new_session=True,  # so that its own children are ended with it
        )  # fmt: skip
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def status(self) -> int:
        """The status of the ended program, as waitpid returns it; see `describe_status`."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status

    def end(self) -> None:
        """End the program and the processes of its session, and reap it.

        It is reaped last: until then its number belongs to no other process group.
        """
        if not ready([self.pidfd], 0.0):
            self._signal(signal.SIGTERM)
            ready([self.pidfd], LEAVE_S)
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        os.close(self.pidfd)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def ready(descriptors: Iterable[int], timeout_s: float) -> set[int]:
    """The descriptors that are readable, or at their end, within the time limit."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _event in poll.poll(timeout_s * 1000)}
