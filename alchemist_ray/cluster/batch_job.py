"""The folder of a batch job: script, log, token, and the address of the job's Ray cluster.

The folder is on a file system that all nodes share: `ALCHEMIST_JOB_FOLDER` names it (job scripts
set the variable), else it is ``~/.alchemist/jobs/<job number>``. `alchemist_ray.deploy.slurm`
writes it; sessions in the job read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

from alchemist_ray.errors import JobError
from alchemist_ray.private_files import write_private

FOLDER_VARIABLE = "ALCHEMIST_JOB_FOLDER"
HOME_VARIABLE = "ALCHEMIST_JOBS"
HOME = "~/.alchemist/jobs"
CLUSTER_FILE = "address.json"
HEAD_ANSWER_S = 2.0  # for Ray's head to accept a connection


def job_id(env: Mapping[str, str]) -> str | None:
    """Return the number of the job that the process is in, or None."""
    return env.get("SLURM_JOB_ID") or env.get("PBS_JOBID")


@dataclass(frozen=True, slots=True)
class JobCluster:
    """The Ray cluster of a job.

    Attributes
    ----------
    address : str
        ``ip:port`` of the head.
    job : str
    head : str
        Name of the head's node in the batch system.
    nodes : list of str
    cpus : int
    keeper_host, keeper_pid : str, int
        The process that stops Ray on SIGTERM.
    container : list of str
        Command prefix that runs a program in the image of the cluster; empty without an image.
    settings : dict
        Environment variables with the site's launcher settings.
    """

    address: str
    job: str
    head: str
    nodes: list[str]
    cpus: int
    keeper_host: str
    keeper_pid: int
    container: list[str]
    settings: dict[str, str]

    def keeper_runs_here(self) -> bool:
        """Return whether the keeper runs on this node: its number may be another process's now."""
        if self.keeper_host != os.uname().nodename:
            return False
        process = Path(f"/proc/{self.keeper_pid}")
        try:
            words = (process / "cmdline").read_bytes()
            return process.stat().st_uid == os.geteuid() and b"alchemist" in words
        except OSError:
            return False


class JobFolder:
    """A job's folder. `make` creates it with mode 700."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def home(cls) -> Path:
        """Return the default parent of the folders of jobs."""
        return Path(os.environ.get(HOME_VARIABLE) or HOME).expanduser()

    @classmethod
    def of(cls, env: Mapping[str, str]) -> JobFolder | None:
        """Return the folder of the job that a process with this environment is in, or None."""
        if given := env.get(FOLDER_VARIABLE):
            return cls(Path(given))
        job = job_id(env)
        return cls(cls.home() / job) if job else None

    @property
    def token(self) -> Path:
        """The file with the token of the job."""
        return self.path / "token"

    def make(self) -> None:
        """Create the folder, accessible to this user only. Raises `JobError` if that fails."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise JobError(
                f"cannot write to the job's folder {self.path}: {error.strerror} (--folder of "
                f"submit, or {FOLDER_VARIABLE}, sets another)"
            ) from None
        if not self._is_ours():
            raise JobError(
                f"{self.path} belongs to another user, who could read the job's token: set "
                f"{FOLDER_VARIABLE} to another folder"
            )
        if stat.S_IMODE(self.path.stat().st_mode) & 0o077:
            self.path.chmod(0o700)

    def _is_ours(self) -> bool:
        try:
            return {self.path.lstat().st_uid, self.path.stat().st_uid} == {os.geteuid()}
        except OSError:
            return False

    def new_token(self) -> str:
        """Write a new token, for Ray and for the supervisors, to a file of mode 600."""
        token = secrets.token_hex(32)
        write_private(self.token, token.encode())
        return token

    def write_cluster(self, cluster: JobCluster) -> None:
        """Publish the running Ray cluster of the job."""
        text = json.dumps(asdict(cluster), indent=1) + "\n"
        write_private(self.path / CLUSTER_FILE, text.encode())

    def cluster(self) -> JobCluster | None:
        """Return the published Ray cluster of the job, or None; never another user's."""
        if not self._is_ours():
            return None
        try:
            return JobCluster(**json.loads((self.path / CLUSTER_FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def live_cluster(self) -> JobCluster | None:
        """Return the cluster if it still answers: a killed keeper leaves its file behind."""
        found = self.cluster()
        if found is None:
            return None
        if found.keeper_runs_here():
            return found
        host, _, port = found.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), HEAD_ANSWER_S).close()
        except OSError:
            return None
        return found

    def clear(self) -> None:
        """Remove the cluster file and the token, and the folder if it is empty then."""
        for path in (self.path / CLUSTER_FILE, self.token):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def environment(self, cluster: JobCluster, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that a program with this environment lacks to join the cluster."""
        settings = {name: value for name, value in cluster.settings.items() if name not in env}
        return settings | {
            FOLDER_VARIABLE: str(self.path),
            "RAY_ADDRESS": cluster.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
        }


def adopt(env: MutableMapping[str, str]) -> bool:
    """Point Ray at the cluster of the job that this process is in, if there is one.

    Call it before Ray is imported: Ray reads its authentication settings then. Returns whether
    token authentication was not set before.
    """
    folder = None if "RAY_ADDRESS" in env else JobFolder.of(env)
    cluster = folder.cluster() if folder is not None else None
    if folder is None or cluster is None:
        return False
    is_new = env.get("RAY_AUTH_MODE") != "token"
    env.update(folder.environment(cluster, env))
    return is_new
