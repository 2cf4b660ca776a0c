"""Start and end of a virtual cluster, on the hosts of a Slurm job or on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from alchemist_ray.deploy.slurm import allocation
from alchemist_ray.deploy.virtual_cluster import host
from alchemist_ray.deploy.virtual_cluster.guests import PORT, Options
from alchemist_ray.errors import JobError
from alchemist_ray.launchers.srun import srun_command
from alchemist_ray.runtime.cluster import batch_job

HOME_VARIABLE = "ALCHEMIST_VIRTUAL"
HOME = "~/.alchemist/virtual"
MODULE = "alchemist_ray.deploy.virtual_cluster.host"
POLL_INTERVAL_S = 0.2
END_S = 60.0
START_S = 30.0  # for the start of a step's tasks, in addition to the guests' limit
LOG = "hosts.log"
KEEPER = "keeper"  # file with host and process id of the holder of the guests, or of its step


def folder_of(name: str) -> Path:
    """Return a cluster's folder, shared by its hosts: settings, token, state of each host."""
    home = os.environ.get(HOME_VARIABLE) or HOME
    return Path(home).expanduser() / name


def hosts() -> list[str]:
    """Return the nodes of this Slurm job; an empty list outside a job."""
    if batch_job.job_id(os.environ) is None:
        return []
    job = allocation.current(os.environ)
    if not job.uses_srun:
        raise JobError(
            f"job {job.job} belongs to PBS, but only srun starts hosts; on one host, unset "
            f"PBS_JOBID"
        )
    return [node.name for node in job.nodes]


def up(options: Options, connect: str, limit_s: float) -> Path:
    """Start the guests, with Ray in them.

    Returns
    -------
    Path
        The cluster's folder; `token` in it is Ray's.

    Raises
    ------
    JobError
        If they are not ready in `limit_s`; they have been removed then.
    """
    names = hosts()
    options = replace(options, hosts=max(1, len(names)))
    folder = folder_of(options.name)
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise JobError(
            f"there is a cluster {options.name!r} already ({folder}): `alchemist virtual-cluster "
            f"down --name {options.name}` ends it"
        ) from None
    try:
        keeper = _start(folder, options, connect, limit_s, names)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise JobError(f"the process that runs the guests cannot start: {error}") from None
        raise
    try:
        _wait_up(folder, options, keeper, limit_s + START_S)
    except BaseException:
        down(options.name)
        raise
    return folder


def _start(
    folder: Path, options: Options, connect: str, limit_s: float, names: list[str]
) -> subprocess.Popen[bytes]:
    with open(os.open(folder / host.TOKEN, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    about = {"options": asdict(options), "connect": connect, "limit_s": limit_s, "hosts": names}
    (folder / host.CLUSTER).write_text(json.dumps(about, indent=1) + "\n")
    command = [sys.executable, "-m", MODULE, str(folder)]
    if names:
        command = [
            *srun_command(os.environ), "--overlap", "--mpi=none", "--quiet", "--kill-on-bad-exit=0",
            f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1",
            f"--nodelist={','.join(names)}", "--input=none", "--job-name=alchemist-guests",
            *command,
        ]  # fmt: skip
    with open(folder / LOG, "wb") as log:
        keeper = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    (folder / KEEPER).write_text(f"{os.uname().nodename} {keeper.pid}\n")
    return keeper


def _wait_up(
    folder: Path, options: Options, keeper: subprocess.Popen[bytes], limit_s: float
) -> None:
    end = time.monotonic() + limit_s
    while True:
        states = [_state(folder, number) for number in range(options.hosts)]
        for state in states:
            if state.startswith(host.FAILED):
                raise JobError(f"the guests did not start{state.removeprefix(host.FAILED)}")
        late = [number for number, state in enumerate(states) if state != host.UP]
        if not late:
            return
        if keeper.poll() is not None:
            said = (folder / LOG).read_text(errors="replace").strip()[-1500:]
            raise JobError(f"the process that runs the guests ended ({keeper.returncode}): {said}")
        if time.monotonic() > end:
            raise JobError(f"hosts {late} did not start their guests within {limit_s:.0f} s")
        time.sleep(POLL_INTERVAL_S)


def _state(folder: Path, number: int) -> str:
    try:
        return (folder / f"host-{number}").read_text()
    except OSError:
        return ""


def down(name: str) -> None:
    """End a cluster's guests on all hosts, and remove its folder.

    Raises
    ------
    JobError
        If it does not exist, or a host does not report the end of its guests.
    """
    folder = folder_of(name)
    try:
        about = json.loads((folder / host.CLUSTER).read_text())
    except OSError:
        raise JobError(
            f"there is no cluster {name!r} ({folder}): `alchemist virtual-cluster up` starts one"
        ) from None
    options = Options(**about["options"])
    (folder / host.STOP).touch()
    end = time.monotonic() + END_S
    runs = True
    while left := [n for n in range(options.hosts) if _state(folder, n) != host.DOWN]:
        if not runs or time.monotonic() > end:
            break
        time.sleep(POLL_INTERVAL_S)
        runs = _keeper_runs(folder)  # once more after its end: for what it wrote last
    if left:  # the holder of the guests was killed
        names = [options.hostname(n) for n in range(options.hosts * options.guests)]
        with contextlib.suppress(JobError, subprocess.TimeoutExpired):
            host.Hypervisor(about["connect"]).destroy(names)
        if about["hosts"]:
            raise JobError(
                f"hosts {', '.join(about['hosts'][n] for n in left)} do not answer: `virsh list` "
                f"there shows whether guests {name}-* remain. Remove {folder} afterwards"
            )
    shutil.rmtree(folder, ignore_errors=True)


def _keeper_runs(folder: Path) -> bool:
    """Return whether the holder of the guests, or its step, may still run."""
    try:
        name, pid = (folder / KEEPER).read_text().split()
        if name != os.uname().nodename:
            return True  # unknown here: wait for the time limit
        keeper = psutil.Process(int(pid))
        return str(folder) in keeper.cmdline() and keeper.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, psutil.Error):
        return False


def to_join(options: Options, folder: Path) -> str:
    """Return the commands to use the cluster."""
    return (
        f"  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={folder / host.TOKEN}\n"
        "  export RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor  # 3.11.x in the guests and here\n"
        f"  ray start --address={options.address(0)}:{PORT} --num-cpus=0\n"
        "  python app.py      runs here, with its ranks in the guests\n"
        f"  alchemist virtual-cluster down --name {options.name}\n"
    )
