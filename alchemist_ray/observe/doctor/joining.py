"""Which Ray cluster is to be examined: its address, how it authenticates, joining it."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from alchemist_ray.observe.doctor.finding import BAD, INFO, OK, WARN, Finding
from alchemist_ray.observe.doctor.machine import usable_cores
from alchemist_ray.runtime.batch_job import FOLDER_VARIABLE

ANSWER_S = 3.0
TOKEN = Path("~/.ray/auth_token")
JOIN = "start one (`ray start --head`, `alchemist slurm start`), or name it with --address"


def authentication() -> Iterator[Finding]:
    """How this process will say who it is, and whether it can."""
    check = "Ray authentication"
    told = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(told or TOKEN).expanduser()
    mode = os.environ.get("RAY_AUTH_MODE") or ("token" if path.is_file() else "disabled")
    if mode != "token":
        yield Finding(
            check, INFO, f"mode {mode}: who reaches Ray's ports runs what he likes as this user"
        )  # fmt: skip
        return
    if os.environ.get("RAY_AUTH_TOKEN"):
        yield Finding(check, OK, "mode token, from RAY_AUTH_TOKEN")
    elif not path.is_file():
        yield Finding(
            check, BAD, f"mode token, and there is no file {path}",
            "set RAY_AUTH_TOKEN_PATH to the cluster's token (in a job of ours it is in the job's "
            "folder), or RAY_AUTH_MODE=disabled if the cluster has none",
        )  # fmt: skip
    elif stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield Finding(check, WARN, f"mode token, and others may read {path}", f"chmod 600 {path}")
    else:
        yield Finding(check, OK, f"mode token, from {path}")


def named_address(given: str | None) -> tuple[str, str]:
    """The address of a cluster that somebody has named, and who; both empty if nobody has."""
    if given:
        return given, "--address"
    if told := os.environ.get("RAY_ADDRESS"):
        return told, "this job's folder" if FOLDER_VARIABLE in os.environ else "RAY_ADDRESS"
    return "", ""


def answers(address: str) -> Iterator[Finding]:
    """Whether something listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except ValueError:
        yield Finding(
            "Ray address", BAD, f"{address!r} is no address", "it is host:port, as in 10.0.0.1:6379"
        )  # fmt: skip
    except OSError as error:
        yield Finding(
            "Ray address", BAD,
            f"nobody answers at {address}: {error.strerror or 'no answer in 3 s'}",
            f"is that Ray up, and does a firewall let this machine through? Else {JOIN}",
        )  # fmt: skip


def join(given: str | None, *, start: bool) -> Iterator[Finding]:
    """Join the cluster that is named, or the one that runs here; else `start` a small one.

    What went wrong is a `bad` finding; afterwards `ray.is_initialized()` tells.
    """
    check = "Ray address"
    address, by = named_address(given)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    plain = bool(address) and address != "auto" and "://" not in address
    if plain and (found := list(answers(address))):
        yield from found
        return
    try:
        try:
            ray.init(address=address or "auto", **quiet)
            yield Finding(
                check, OK, f"{ray.get_runtime_context().gcs_address} ({by or 'runs here'})"
            )
        except ConnectionError:
            if address or not start:
                raise
            ray.init(num_cpus=max(2, int(usable_cores())), include_dashboard=False, **quiet)
            yield Finding(check, INFO, "no Ray runs here: one was started for this examination")
    except Exception as error:  # Ray raises what it likes
        words = str(error).strip().splitlines()[0] if str(error).strip() else ""
        yield Finding(check, BAD, f"cannot be joined: {type(error).__name__}: {words}", JOIN)
