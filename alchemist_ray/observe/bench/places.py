"""The same measures natively, in a gang, in a container and in guests, one after the other.

Each is a command with its own processes, so that nothing of one runs during the next.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from alchemist_ray.deploy.virtual_cluster import cluster, host
from alchemist_ray.deploy.virtual_cluster.options import PORT, Options
from alchemist_ray.observe.bench.hpc import BenchError, Result, result
from alchemist_ray.version import __version__

LIMIT_S = 1800.0  # of a place; emulated guests are slow
LOOK_S = 20.0
IMAGE = f"alchemist-on-ray:{__version__}"
CONTAINER = f"podman run --rm --shm-size=2g {IMAGE}"
TAIL = 300  # characters of an error
EMULATED = (
    "guest: emulated by QEMU, because KVM does not work here: its ratios are those of the "
    "emulation, not of virtualization"
)


class NotMeasuredError(Exception):
    """Why a place has no result."""


def compare_places(
    workers: int, seconds: float, container: str, guest: str, ray_address: str | None = None
) -> tuple[list[Result], dict[str, str], list[str]]:
    """Measure in each place, with one BLAS thread per rank.

    Parameters
    ----------
    workers : int
        MPI ranks.
    seconds : float
        As for `hpc.measure`.
    container : str
        A command that runs the words after it in a container.
    guest : str
        Name of a virtual cluster that this machine has joined.
    ray_address : str, optional
        Ray cluster of the gang. Default: as a session finds it.

    Returns
    -------
    results : list of Result
    missing : dict of str to str
        Places without a result, and the reasons.
    notes : list of str

    Raises
    ------
    BenchError
        If not even the plain MPI program runs.
    """
    words = ["bench", "hpc", "--json", f"--workers={workers}", f"--seconds={seconds}"]
    cluster_of_gang = {"RAY_ADDRESS": ray_address} if ray_address else {}
    here = [sys.executable, "-m", "alchemist_ray.cli"]
    places: dict[str, Callable[[], Result]] = {
        "native": lambda: _native([*here, "run-routine", "hpc", "suite"], workers, seconds),
        "gang": lambda: _read([*here, *words, "--label=gang"], cluster_of_gang),
        "container": lambda: _container(container, [*words, "--label=container"]),
        "guest": lambda: _guest(guest, [*here, *words, "--label=guest"]),
    }
    results, missing = [], {}
    for name, measured in places.items():
        sys.stderr.write(f"measuring: {name}\n")
        try:
            results.append(measured())
        except NotMeasuredError as reason:
            missing[name] = str(reason)
    if not results:
        raise BenchError(f"nothing could be measured: {missing}")
    measured_guest = any(its.label == "guest" for its in results)
    notes = [EMULATED] if measured_guest and _options(guest).emulate else []
    return results, missing, notes


def _native(command: Sequence[str], workers: int, seconds: float) -> Result:
    """A plain program of mpiexec, without Ray."""
    said = _run([*command, f"seconds={seconds}", f"--ranks={workers}"], {})
    told = {
        name: ast.literal_eval(text)
        for name, text in re.findall(r"^(measures|ranks) = (\[.*\])$", said, re.MULTILINE)
    }
    return result("native", told["measures"], told["ranks"])


def _container(command: str, words: Sequence[str]) -> Result:
    program = shlex.split(command)
    if not shutil.which(program[0]):
        raise NotMeasuredError(f"no {program[0]} on this machine")
    if (
        command == CONTAINER
        and subprocess.run(
            ["podman", "image", "exists", IMAGE], capture_output=True, timeout=LOOK_S, check=False
        ).returncode
    ):
        raise NotMeasuredError(f"no image {IMAGE} here: `podman build -t {IMAGE} .` makes it")
    return _read([*program, "alchemist", *words], {})


def _options(name: str) -> Options:
    about = cluster.folder_of(name) / host.CLUSTER
    return Options(**json.loads(about.read_text())["options"])


def _guest(name: str, command: Sequence[str]) -> Result:
    folder = cluster.folder_of(name)
    try:
        options = _options(name)
    except OSError:
        raise NotMeasuredError(
            f"no virtual cluster {name!r}: `alchemist virtual-cluster up` starts one"
        ) from None
    return _read(
        command,
        {
            "RAY_ADDRESS": f"{options.address(0)}:{PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / host.TOKEN),
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        },
    )


def _read(command: Sequence[str], variables: Mapping[str, str]) -> Result:
    said = _run(command, variables)
    try:
        return Result.parse(said[said.index("{") :])
    except (BenchError, ValueError) as error:
        raise NotMeasuredError(f"{shlex.join(command)}: {error}") from None


def _run(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Run a command to its end; its standard output."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasuredError(str(error)) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-TAIL:]
        raise NotMeasuredError(f"exit code {done.returncode}: {said}")
    return done.stdout
