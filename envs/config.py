"""The config of an environment: the paper's keys and the options of this package."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from alchemist_ray.arguments import (
    MAX_PORT,
    MAX_SECONDS,
    checked_cpus,
    checked_env,
    checked_gpus,
    checked_path,
    checked_seconds,
    near,
    positive_int,
)
from alchemist_ray.attached.options import START_TIMEOUT_S
from alchemist_ray.cluster.placement import Reservation
from envs.errors import EnvConfigError

VECTOR_ONLY = ("copies", "num_envs", "agents", "gangs")
MAX_RESTARTS = 10  # of gangs within an hour
Check = Callable[[str, Any], Any]


def _whole(least: int, most: float = math.inf) -> Check:
    def check(name: str, value: Any) -> int:
        positive_int(name, value, EnvConfigError, least=least)
        if value > most:
            raise EnvConfigError(f"{name}={value}: it must be {least} to {most}")
        return int(value)

    return check


def _path(name: str, value: Any) -> str:
    return str(checked_path(name, value, EnvConfigError))


def _one_of(*choices: str) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            allowed = ", ".join(map(repr, choices))
            raise EnvConfigError(f"{name} must be one of {allowed}; got {value!r}")
        return value

    return check


def _that_is(requirement: str, fits: Callable[[Any], bool]) -> Check:
    def check(name: str, value: Any) -> Any:
        with contextlib.suppress(TypeError, ValueError):
            if fits(value):
                return value
        raise EnvConfigError(f"{name}={value!r}: it must be {requirement}")

    return check


def _placement(name: str, value: Any) -> Any:
    if isinstance(value, Reservation):
        return value
    if not isinstance(value, Mapping):
        return _one_of("own", "inherit", "auto")(name, value)
    valid = len(value) > 0 and set(value) <= {"labels", "resources"}
    if not valid or not all(isinstance(part, Mapping) for part in value.values()):
        raise EnvConfigError(
            f"{name}={dict(value)!r}: for nodes of your choice it must be "
            "{'labels': {key: value}, 'resources': {name: amount of each rank}}, or one of the two"
        )
    for key, label in value.get("labels", {}).items():
        if not isinstance(key, str) or not isinstance(label, str):
            raise EnvConfigError(
                f"{name}: the label {key!r}: {label!r} must consist of two strings"
            )
    for resource, amount in value.get("resources", {}).items():
        if resource in ("CPU", "GPU"):
            key = f"{resource.lower()}s_per_worker"
            raise EnvConfigError(f"{name}: give the {resource}s of a rank by {key}")
        checked_cpus(f"{name}: the resource {resource!r}", amount, EnvConfigError)
    return value


def _number(name: str, value: Any) -> float:
    return float(_finite(name, value))


def _env(_name: str, value: Any) -> dict[str, str]:
    return checked_env(value, EnvConfigError)


def _options(name: str, value: Any) -> dict[str, Any]:
    return dict(_mapping(name, value))


_seconds = partial(checked_seconds, kind=EnvConfigError, most=MAX_SECONDS)
_cpus = partial(checked_cpus, kind=EnvConfigError)
_gpus = partial(checked_gpus, kind=EnvConfigError)
_flag = _that_is("True or False", lambda flag: isinstance(flag, bool))
_host = _that_is("a host name or IP address", lambda host: isinstance(host, str) and host != "")
_mapping = _that_is("a dict of options of the simulator", lambda sim: isinstance(sim, Mapping))
_finite = _that_is(
    "a finite number", lambda number: math.isfinite(number) and not isinstance(number, bool)
)


def _key(check: Check, **default: Any) -> Any:
    """A key of the config. Its check takes the key's name and value, and returns it or raises."""
    return field(metadata={"check": check}, **default)


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
    gpus_per_worker : float
        GPUs of each rank; a fraction below 1: ranks share one.
    env : mapping of str to str
        Environment variables of the ranks (`AlchemistSession`).
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
    num_envs : int, optional
        Vector environments only: sub-environments in all (copies x agents), instead of `copies`.
    agents : int, optional
        Vector environments only: the number of agents that the simulator must have.
    gangs : int
        Vector environments only: the number of gangs of `num_workers` ranks that share the
        copies. A lost gang ends the episodes of its own copies only.
    """

    lib_name: str
    lib_path: str | None = _key(_path, default=None)
    num_workers: int = _key(_whole(1), default=1)
    hostname: str | None = _key(_host, default=None)
    port: int | None = _key(_whole(1, MAX_PORT), default=None)
    sim: Mapping[str, Any] = _key(_options, default_factory=dict)
    step_timeout_s: float = _key(_seconds, default=60.0)
    start_timeout_s: float = _key(_seconds, default=START_TIMEOUT_S)
    placement: str | Mapping[str, Any] | Reservation = _key(_placement, default="own")  # noqa: RUF009 - a field
    cpus_per_worker: float | None = _key(_cpus, default=None)
    gpus_per_worker: float = _key(_gpus, default=0.0)
    env: Mapping[str, str] = _key(_env, default_factory=dict)
    max_restarts: int = _key(_whole(0), default=MAX_RESTARTS)
    on_failure: str = _key(_one_of("raise", "truncate"), default="raise")
    failure_reward: float = _key(_number, default=0.0)
    check_finite: bool = _key(_flag, default=True)
    out_of_bounds: str = _key(_one_of("clip", "refuse"), default="clip")
    copies: int | None = _key(_whole(1), default=None)
    num_envs: int | None = _key(_whole(1), default=None)
    agents: int | None = _key(_whole(1), default=None)
    gangs: int = _key(_whole(1), default=1)

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
        if given.get("sim") is None:
            given["sim"] = {}
        for key in fields(cls):
            optional = key.default is None and given.get(key.name) is None
            if key.name in given and "check" in key.metadata and not optional:
                name, value = f"config[{key.name!r}]", given[key.name]
                given[key.name] = key.metadata["check"](name, value)
        if (given.get("hostname") is None) != (given.get("port") is None):
            raise EnvConfigError(
                "config needs both 'hostname' and 'port' of a Ray cluster, or neither"
            )
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


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r}")
