"""A job's folder: script, log, token, and the address by which its Ray is found.

It lies in a file system that all nodes see: where ``ALCHEMIST_JOB_FOLDER`` says (job scripts set
it), else ``~/.alchemist/jobs/<number of the job>``. A process anywhere in the job looks there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

from alchemist_ray.deploy.slurm.allocation import job_id

VARIABLE = "ALCHEMIST_JOB_FOLDER"
HOME_VARIABLE = "ALCHEMIST_JOBS"
HOME = "~/.alchemist/jobs"
ADDRESS = "address.json"
ANSWER_S = 2.0  # for Ray's head to answer


@dataclass(frozen=True, slots=True)
class Address:
    """A job's Ray.

    Attributes
    ----------
    address : str
        ``ip:port`` of its head.
    job : str
    head : str
        The batch system's name of the node with the head.
    nodes : list of str
    cpus : int
    keeper_host, keeper_pid : str, int
        The process that ends Ray when it is told to.
    container : list of str
        What runs a program in the image that Ray is in; empty: there is none.
    settings : dict
        What the site says to launchers, by environment variables.
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


class JobFolder:
    """See the module. Made with mode 700 where it is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def home(cls) -> Path:
        """Where folders of jobs lie if nothing else is said."""
        return Path(os.environ.get(HOME_VARIABLE) or HOME).expanduser()

    @classmethod
    def of(cls, env: MutableMapping[str, str]) -> JobFolder | None:
        """The folder of the job that a process with this environment is in, or None."""
        if given := env.get(VARIABLE):
            return cls(Path(given))
        job = job_id(env)
        return cls(cls.home() / job) if job else None

    @property
    def token(self) -> Path:
        return self.path / "token"

    def make(self) -> None:
        """Make the folder, for this user only."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def new_token(self) -> str:
        """Write a fresh secret into a file of mode 600; Ray's and our own."""
        secret = secrets.token_hex(32)
        self._write(self.token, secret)
        return secret

    def write_address(self, address: Address) -> None:
        """Say that the job's Ray is up."""
        self._write(self.path / ADDRESS, json.dumps(asdict(address), indent=1) + "\n")

    def address(self) -> Address | None:
        """The job's Ray, if it is up."""
        try:
            return Address(**json.loads((self.path / ADDRESS).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def live_address(self) -> Address | None:
        """The same, unless that Ray is gone: its keeper was killed before it could say so."""
        found = self.address()
        if found is None:
            return None
        if found.keeper_host == os.uname().nodename and Path(f"/proc/{found.keeper_pid}").exists():
            return found
        host, _, port = found.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), ANSWER_S).close()
        except OSError:
            return None
        return found

    def clear(self) -> None:
        """Take back token and address; a folder with nothing else in it goes as well."""
        for path in (self.path / ADDRESS, self.token):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def environment(self, address: Address, env: Mapping[str, str]) -> dict[str, str]:
        """What a program with this environment still needs to join the job's Ray."""
        settings = {name: value for name, value in address.settings.items() if name not in env}
        return settings | {
            VARIABLE: str(self.path),
            "RAY_ADDRESS": address.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
        }

    def _write(self, path: Path, text: str) -> None:
        unfinished = path.with_suffix(".new")
        with open(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        unfinished.rename(path)


def adopt(env: MutableMapping[str, str]) -> bool:
    """Point Ray at the job's own cluster, if this process is in a job that has one.

    To be called before ray is imported, which then reads how to authenticate itself.
    Returns whether that had not been said before.
    """
    folder = None if "RAY_ADDRESS" in env else JobFolder.of(env)
    address = folder.address() if folder is not None else None
    if folder is not None and address is not None:
        new = env.get("RAY_AUTH_MODE") != "token"
        env.update(folder.environment(address, env))
        return new
    return False
