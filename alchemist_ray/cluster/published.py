"""Gangs that the other jobs of a user find by their name.

A file of mode 600 in the user's home has the address of the gang's gateway and a token.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from alchemist_ray.attached.options import GANG_NAME, AttachOptions
from alchemist_ray.attached.registry import ADDRESS_VARIABLE
from alchemist_ray.cluster.batch_job import job_id
from alchemist_ray.private_files import write_private

FOLDER = "~/.alchemist/gangs"


@dataclass(frozen=True, slots=True)
class Published:
    """How another job reaches a gang: through the gateway of `job`, the job that runs it."""

    address: str
    token: str
    job: str | None


def path_of(gang: str) -> Path:
    """The file of a gang."""
    return Path(FOLDER).expanduser() / f"{gang}.json"


def publish(gang: str, address: str, token: str) -> Path:
    """Write the file of a gang, which replaces that of an earlier one with its name."""
    path = path_of(gang)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, json.dumps(asdict(Published(address, token, job_id(os.environ)))).encode())
    return path


def found(options: AttachOptions) -> AttachOptions:
    """The options with address and token of a gang that another job has published."""
    known = GANG_NAME.fullmatch(options.name)  # else it is no file's name either
    if known and options.address is None and ADDRESS_VARIABLE not in os.environ:
        try:
            there = Published(**json.loads(path_of(options.name).read_text()))
        except (OSError, ValueError, TypeError):
            return options
        if there.job != job_id(os.environ):
            return replace(options, address=there.address, token=there.token)
    return options
