"""The config of an environment: the paper's keys and the options of this package."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from alchemist_ray.arguments import (
    MAX_PORT,
    MAX_SECONDS,
    checked_cpus,
    checked_path,
    checked_seconds,
    near,
)
from alchemist_ray.gang.options import START_TIMEOUT_S
from alchemist_ray.runtime.cluster.placement import Reservation
from envs.errors import EnvConfigError

CHOICES = {
    "placement": ("own", "inherit", "auto"),
    "on_failure": ("raise", "truncate"),
    "out_of_bounds": ("clip", "refuse"),
}
VECTOR_ONLY = ("copies", "agents", "gangs")
MAX_RESTARTS = 10  # of gangs within an hour


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """The validated config of an environment.

    Parameters
    ----------
    lib_name : str
        The simulator: shipped (``"rayleigh_benard"``, ``"lammps_crystal"``), installed, or, with
        `lib_path`, any name.
    lib_path : path_like, optional
        Its Python file or shared object, on a path that every node can read.
    num_workers : int
        MPI ranks of a gang.
    hostname, port : str and int, optional
        Head of the Ray cluster to join. Default: the cluster of this process or machine, or a new
        one. If there is no cluster at this address, a warning says which one is used.
    sim : mapping
        Options of the simulator, for its ``setup``; any JSON values.
    step_timeout_s : float
        Time limit of a step or a reset, in seconds. Then the gang is killed.
    start_timeout_s : float
        Time limit for starting a gang and its simulator, in seconds.
    placement : {"own", "inherit", "auto"}, mapping, or Reservation
        Where the ranks get their CPUs: a reservation of their own; the CPUs of this Ray task or
        actor; these if they hold the ranks and one more, else a reservation of their own; nodes
        that have ``{"labels": {key: value}, "resources": {name: amount of each rank}}`` in Ray;
        or existing bundles.
    cpus_per_worker : float, optional
        CPUs of each rank. Default: 1.
    max_restarts : int
        How many gangs may be lost within an hour, by this environment and by those that it
        replaces: closed ones of the same simulator whose last gang was lost.
    on_failure : {"raise", "truncate"}
        After a failed simulation or a lost gang: raise, or end the episode with
        ``truncated=True`` and ``info["gang_lost"]``.
    failure_reward : float
        The reward of a step that failed, with ``on_failure="truncate"``.
    check_finite : bool
        Raise `NotFiniteError` for observations and rewards that are NaN or infinite.
    out_of_bounds : {"clip", "refuse"}
        Clip actions to the bounds of the action space, or raise `BadActionError`.
    copies : int, optional
        Vector environments only: independent simulations, distributed over the ranks.
    agents : int, optional
        Vector environments only: the number of agents that the simulator must have.
    gangs : int
        Vector environments only: the number of gangs of `num_workers` ranks that share the
        copies. A lost gang ends the episodes of its own copies only.
    """

    lib_name: str
    lib_path: str | None = None
    num_workers: int = 1
    hostname: str | None = None
    port: int | None = None
    sim: Mapping[str, Any] = field(default_factory=dict)
    step_timeout_s: float = 60.0
    start_timeout_s: float = START_TIMEOUT_S
    placement: str | Mapping[str, Any] | Reservation = "own"
    cpus_per_worker: float | None = None
    max_restarts: int = MAX_RESTARTS
    on_failure: str = "raise"
    failure_reward: float = 0.0
    check_finite: bool = True
    out_of_bounds: str = "clip"
    copies: int | None = None
    agents: int | None = None
    gangs: int = 1

    @classmethod
    def checked(
        cls, config: Mapping[str, Any] | None, options: Mapping[str, Any], *, vector: bool
    ) -> EnvConfig:
        """Validate a config as the user gave it; `options` override `config`.

        Raises
        ------
        EnvConfigError
            It names the key and the allowed values.
        """
        if config is not None and not isinstance(config, Mapping):
            raise EnvConfigError(f"config is a {type(config).__name__}; it must be a dict")
        given = {**(config or {}), **options}
        _check_keys(given, [f.name for f in fields(cls)], vector)
        if not isinstance(given.get("lib_name"), str) or not given["lib_name"]:
            raise EnvConfigError(
                "config needs 'lib_name', the name of a simulator: 'rayleigh_benard', "
                "'lammps_crystal', or your own with its file in 'lib_path'"
            )
        for key in ("num_workers", "gangs", "copies", "agents", "port"):
            if given.get(key) is not None or (key in ("num_workers", "gangs") and key in given):
                given[key] = _integer(key, given[key], 1)
        if "max_restarts" in given:
            given["max_restarts"] = _integer("max_restarts", given["max_restarts"], 0)
        for key in ("step_timeout_s", "start_timeout_s"):
            if key in given:
                given[key] = checked_seconds(
                    f"config[{key!r}]", given[key], EnvConfigError, most=MAX_SECONDS
                )
        if given.get("cpus_per_worker") is not None:
            given["cpus_per_worker"] = checked_cpus(
                "config['cpus_per_worker']", given["cpus_per_worker"], EnvConfigError
            )
        for key, choices in CHOICES.items():
            value = given.get(key, choices[0])
            if key == "placement" and isinstance(value, Mapping):
                _check_nodes(value)
                continue
            known = isinstance(value, str) and value in choices
            if not known and not isinstance(value, Reservation):
                allowed = ", ".join(map(repr, choices))
                raise EnvConfigError(f"config[{key!r}] must be one of {allowed}; got {value!r}")
        if "failure_reward" in given:
            given["failure_reward"] = _reward(given["failure_reward"])
        if not isinstance(given.get("check_finite", True), bool):
            raise EnvConfigError(
                f"config['check_finite']={given['check_finite']!r}: it must be True or False"
            )
        if given.get("hostname") == "" or not isinstance(given.get("hostname"), str | None):
            raise EnvConfigError(
                f"config['hostname']={given['hostname']!r}: it must be a host name or IP address"
            )
        if (given.get("port") or 0) > MAX_PORT:
            raise EnvConfigError(f"config['port']={given['port']}: it must be 1 to {MAX_PORT}")
        if (given.get("hostname") is None) != (given.get("port") is None):
            raise EnvConfigError(
                "config needs both 'hostname' and 'port' of a Ray cluster, or neither"
            )
        if given.get("lib_path") is not None:
            given["lib_path"] = _path(given["lib_path"])
        sim = given.get("sim")
        if sim is not None and not isinstance(sim, Mapping):
            raise EnvConfigError(
                f"config['sim']={sim!r}: it must be a dict of options of the simulator"
            )
        given["sim"] = dict(sim or {})
        made = cls(**given)
        made.sim_json()
        if made.copies is not None and made.copies < made.gangs:
            raise EnvConfigError(
                f"config['gangs'] must be 1 to {made.copies} (the copies); got {made.gangs}"
            )
        return made

    def sim_json(self) -> str:
        """The options of the simulator as JSON, for its ``setup``. Raises `EnvConfigError`."""
        try:
            return json.dumps(self.sim, sort_keys=True, allow_nan=False, default=_plain)
        except (TypeError, ValueError) as error:
            raise EnvConfigError(f"config['sim'] cannot be written as JSON: {error}") from None

    def simulator(self) -> tuple[Any, ...]:
        """A key that determines the spec: configs with the same key have the same spaces."""
        modified = 0
        if self.lib_path is not None and Path(self.lib_path).exists():
            modified = Path(self.lib_path).stat().st_mtime_ns
        return self.lib_name, self.lib_path, modified, self.sim_json()


def _check_keys(given: Mapping[str, Any], known: list[str], vector: bool) -> None:
    if not vector:
        known = [name for name in known if name not in VECTOR_ONLY]
    for key in given:
        if key in known:
            continue
        hint = near(key, known)
        if key in VECTOR_ONLY:
            hint = "; it is for HPCSimulatorVectorEnv"
        raise EnvConfigError(f"unknown config key {key!r}{hint}. Keys: {', '.join(known)}")


def _check_nodes(placement: Mapping[str, Any]) -> None:
    valid = len(placement) > 0 and set(placement) <= {"labels", "resources"}
    if not valid or not all(isinstance(part, Mapping) for part in placement.values()):
        raise EnvConfigError(
            f"config['placement']={dict(placement)!r}: for nodes of your choice it must be "
            "{'labels': {key: value}, 'resources': {name: amount of each rank}}, or one of the two"
        )
    for key, value in placement.get("labels", {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise EnvConfigError(
                f"config['placement']: the label {key!r}: {value!r} must consist of two strings"
            )
    for name, amount in placement.get("resources", {}).items():
        if name == "CPU":
            raise EnvConfigError("config['placement']: give the CPUs of a rank by cpus_per_worker")
        checked_cpus(f"config['placement']: the resource {name!r}", amount, EnvConfigError)


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r}")


def _reward(value: Any) -> float:
    """A finite number. Raises `EnvConfigError`."""
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(value) and not isinstance(value, bool):
            return float(value)
    raise EnvConfigError(f"config['failure_reward']={value!r}: it must be a finite number")


def _integer(key: str, value: Any, least: int) -> int:
    try:
        number = int(value)
        if isinstance(value, bool) or number != float(value) or number < least:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise EnvConfigError(
            f"config[{key!r}]={value!r}: it must be an integer, at least {least}"
        ) from None
    return number


def _path(value: Any) -> str:
    return str(checked_path("config['lib_path']", value, EnvConfigError))
