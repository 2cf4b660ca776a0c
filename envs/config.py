"""What an environment can be told: the config of the paper, and a little more."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from alchemist_ray.runtime.placement import Reservation
from envs.errors import EnvConfigError

PLACEMENTS = ("own", "inherit")


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """The config of an environment, checked.

    Parameters
    ----------
    lib_name : str
        The simulator: shipped (``"rayleigh_benard"``, ``"lammps_crystal"``), installed, or, with
        `lib_path`, any name.
    lib_path : path_like, optional
        Its Python file or shared object, which every node can read.
    num_workers : int
        MPI ranks.
    hostname, port : str and int, optional
        Head of the Ray cluster to join. Default: this process's or machine's, or a new one.
    sim : mapping
        Options of the simulator, for its ``setup``; anything that JSON can say.
    step_timeout_s : float
        Most seconds that a step or a reset may take; then the gang is killed.
    start_timeout_s : float
        The same for the start of a gang with the simulator on it.
    placement : {"own", "inherit"} or Reservation
        Reserve CPUs for the ranks, run them inside those of this Ray task or actor, or in
        bundles that are there (`envs.rllib`).
    cpus_per_worker : float, optional
        CPUs of each rank. Default: 1.
    max_restarts : int
        How many gangs may be lost.
    copies : int, optional
        Vector environments only: independent simulations, dealt to the ranks.
    agents : int, optional
        Vector environments only: how many agents a simulation must have.
    """

    lib_name: str
    lib_path: str | None = None
    num_workers: int = 1
    hostname: str | None = None
    port: int | None = None
    sim: Mapping[str, Any] = field(default_factory=dict)
    step_timeout_s: float = 60.0
    start_timeout_s: float = 60.0
    placement: str | Reservation = "own"
    cpus_per_worker: float | None = None
    max_restarts: int = 10
    copies: int | None = None
    agents: int | None = None

    @classmethod
    def checked(
        cls, config: Mapping[str, Any] | None, options: Mapping[str, Any], *, vector: bool
    ) -> EnvConfig:
        """A config as the user gave it; `options` win over `config`.

        Raises
        ------
        EnvConfigError
            Which names the key and what it can be.
        """
        if config is not None and not isinstance(config, Mapping):
            raise EnvConfigError(f"config is a {type(config).__name__}: it must be a dict")
        given = {**(config or {}), **options}
        known = [f.name for f in fields(cls)]
        if not vector:
            known = [name for name in known if name not in ("copies", "agents")]
        for key in given:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                where = "" if vector or key not in ("copies", "agents") else (
                    "; that is for HPCSimulatorVectorEnv"
                )  # fmt: skip
                raise EnvConfigError(
                    f"config has no key {key!r}{hint}{where}. Keys: {', '.join(known)}"
                )
        if not isinstance(given.get("lib_name"), str) or not given["lib_name"]:
            raise EnvConfigError(
                "config needs 'lib_name', the name of a simulator: 'rayleigh_benard', "
                "'lammps_crystal', or one of your own with its file in 'lib_path'"
            )
        for key in ("num_workers", "copies", "agents", "port"):
            if given.get(key) is not None or (key == "num_workers" and key in given):
                given[key] = _whole(key, given[key], 1)
        if "max_restarts" in given:
            given["max_restarts"] = _whole("max_restarts", given["max_restarts"], 0)
        for key in ("step_timeout_s", "start_timeout_s"):
            if key in given:
                given[key] = _seconds(key, given[key])
        placement = given.get("placement", "own")
        if not isinstance(placement, Reservation) and placement not in PLACEMENTS:
            choices = ", ".join(PLACEMENTS)
            raise EnvConfigError(f"config['placement']={placement!r}: it is one of {choices}")
        if (given.get("hostname") is None) != (given.get("port") is None):
            raise EnvConfigError(
                "config needs both 'hostname' and 'port' of a Ray cluster, or none"
            )
        if given.get("lib_path") is not None:
            given["lib_path"] = _path(given["lib_path"])
        sim = given.get("sim")
        if sim is not None and not isinstance(sim, Mapping):
            raise EnvConfigError(f"config['sim']={sim!r}: it is a dict of the simulator's options")
        given["sim"] = dict(sim or {})
        made = cls(**given)
        made.sim_json()
        return made

    def sim_json(self) -> str:
        """The simulator's options as its ``setup`` gets them. Raises `EnvConfigError`."""
        try:
            return json.dumps(self.sim, sort_keys=True, allow_nan=False, default=_plain)
        except (TypeError, ValueError) as error:
            raise EnvConfigError(f"config['sim'] cannot be written as JSON: {error}") from None

    def simulator(self) -> tuple[Any, ...]:
        """What decides on the spec: two configs that agree in it have the same spaces."""
        written = 0
        if self.lib_path is not None and Path(self.lib_path).exists():
            written = Path(self.lib_path).stat().st_mtime_ns
        return self.lib_name, self.lib_path, written, self.sim_json()


def _plain(value: Any) -> Any:
    """NumPy's scalars and arrays as JSON can say them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r}")


def _whole(key: str, value: Any, least: int) -> int:
    try:
        number = int(value)
        if isinstance(value, bool) or number != float(value) or number < least:
            raise ValueError
    except (TypeError, ValueError):
        raise EnvConfigError(
            f"config[{key!r}]={value!r}: it is a whole number, at least {least}"
        ) from None
    return number


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise EnvConfigError(f"config[{key!r}]={value!r}: it is a number of seconds over 0")
    return float(value)


def _path(value: Any) -> str:
    try:
        return str(Path(value).expanduser().absolute())
    except TypeError:
        raise EnvConfigError(
            f"config['lib_path']={value!r}: it is the path of a .py file or a shared object"
        ) from None
