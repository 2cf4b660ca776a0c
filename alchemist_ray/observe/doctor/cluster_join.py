"""The Ray cluster to check: its address, its authentication, joining it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import ray

from alchemist_ray.observe.doctor.finding import BAD, INFO, OK, WARN, Finding
from alchemist_ray.observe.doctor.machine import usable_cores
from alchemist_ray.observe.doctor.security import auth_mode, token_path
from alchemist_ray.runtime import ray_cluster
from alchemist_ray.runtime.batch_job import FOLDER_VARIABLE

CONNECT_TIMEOUT_S = 3.0
JOIN = "start Ray (`ray start --head`, `alchemist slurm start`), or set --address"


def authentication() -> Iterator[Finding]:
    """Check this process's authentication with Ray."""
    check = "Ray authentication"
    path, mode = token_path(), auth_mode()
    if mode != "token":
        yield Finding(
            check, WARN,
            f"mode {mode}: anyone who can connect to Ray's ports runs code as this user",
            "set RAY_AUTH_MODE=token (Ray 2.52 or later) before Ray starts and in every client; "
            "harmless only if no other user can log in or connect",
        )  # fmt: skip
        return
    if os.environ.get("RAY_AUTH_TOKEN"):
        yield Finding(check, OK, "mode token, from RAY_AUTH_TOKEN")
    elif not path.is_file():
        yield Finding(
            check, BAD, f"mode token, but there is no file {path}",
            "set RAY_AUTH_TOKEN_PATH to the cluster's token (in a job of `alchemist slurm`: in the "
            "job's folder), or RAY_AUTH_MODE=disabled if the cluster has none",
        )  # fmt: skip
    else:
        yield Finding(check, OK, f"mode token, from {path}")


def named_address(given: str | None) -> tuple[str, str]:
    """Return the configured address of a cluster and its source, or two empty strings."""
    if given:
        return given, "--address"
    if told := os.environ.get("RAY_ADDRESS"):
        return told, "this job's folder" if FOLDER_VARIABLE in os.environ else "RAY_ADDRESS"
    return "", ""


def answers(address: str) -> Iterator[Finding]:
    """Check that a process listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except ValueError:
        yield Finding(
            "Ray address", BAD, f"{address!r} is not an address",
            "give host:port, as in 10.0.0.1:6379"
        )  # fmt: skip
    except OSError as error:
        yield Finding(
            "Ray address", BAD,
            f"no answer at {address}: {error.strerror or 'timeout after 3 s'}",
            f"check that this Ray runs and that no firewall blocks this machine; otherwise {JOIN}",
        )  # fmt: skip


def join(given: str | None, *, start: bool) -> Iterator[Finding]:
    """Join the configured cluster, or the one on this machine; else `start` a small one.

    A failure is a `bad` finding, and Ray is not initialized afterwards.
    """
    check = "Ray address"
    address, by = named_address(given)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    plain = bool(address) and address != "auto" and "://" not in address
    if plain and (found := list(answers(address))):
        yield from found
        return
    found_here = ray_cluster.own_head() if address in ("", "auto") else address
    try:
        if found_here:
            ray_cluster.check(found_here, found_here)
            ray.init(address=found_here, **quiet)
            yield Finding(
                check, OK, f"{ray.get_runtime_context().gcs_address} ({by or 'runs here'})"
            )
        elif start:
            ray_cluster.start_ray(max(2, int(usable_cores())))
            yield Finding(check, INFO, "no Ray runs here: one was started for these checks")
        else:
            yield Finding(check, INFO, f"this user runs no Ray here: {JOIN}")
    except Exception as error:  # Ray raises many types
        words = str(error).strip().splitlines()[0] if str(error).strip() else ""
        yield Finding(check, BAD, f"cannot be joined: {type(error).__name__}: {words}", JOIN)
