"""GangOptions: the options of a session and its gang. Each is declared here and nowhere else.

`AlchemistSession`, its signature and docstring, requests to GroupManagers and the gateway's
protocol are derived from these classes.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from alchemist_ray.arguments import (
    MAX_SECONDS,
    checked_choice,
    checked_cpus,
    checked_env,
    checked_flag,
    checked_gpus,
    checked_path,
    checked_seconds,
    known_options,
    positive_int,
)
from alchemist_ray.errors import ResourceError, SessionError
from alchemist_ray.plural import counted
from mpi_workers.deadlines import MOST_STUCK_S, STUCK_S

Workers = int | tuple[int, int]  # ranks, or the fewest and the most

START_TIMEOUT_S = 60.0
DETACHED_GRACE_S = 60.0  # how long a process may be disconnected and keep its leases
PROCESS, DETACHED = "process", "detached"
PLACEMENTS = ("own", "inherit")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")  # Ray's, over ranks
GANG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
HERE = {"here": True}  # not sent to a gateway: it is about this process
IN_CLUSTER = {
    "in_cluster": "max_failures and checkpoint_folder are for sessions in the gang's Ray cluster: "
    "start a detached gang there, and attach to it through the gateway"
}

P = ParamSpec("P")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741


class RankResources(NamedTuple):
    """The resources that are reserved for each rank."""

    cpus: float
    gpus: float = 0.0

    def times(self, ranks: int) -> dict[str, float]:
        """Ray's resources for this many ranks."""
        return {"CPU": ranks * self.cpus} | ({"GPU": ranks * self.gpus} if self.gpus else {})

    def room(self, there: Mapping[str, float]) -> int:
        """For how many ranks these resources are enough."""
        wanted = self.times(1).items()
        return min(int(there.get(name, 0.0) / each + 1e-9) for name, each in wanted)

    def __str__(self) -> str:
        gpus = f" and {counted(self.gpus, 'GPU')}" if self.gpus else ""
        return counted(self.cpus, "CPU") + gpus


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """How this process reaches a gang, and what it shows.

    Parameters
    ----------
    address : str, optional
        ``"alchemist://host:port"`` of a gateway (``docs/gateway.md``), which this process reaches
        without Ray or MPI; or ``"host:port"`` of a Ray cluster. Default: that of the environment
        variable ``ALCHEMIST_ADDRESS``, else the Ray cluster of this process or machine.
    token : str, optional
        For a gateway. Default: the environment variable ``ALCHEMIST_TOKEN``.
    progress : bool, optional
        Show progress bars for transfers of more than a second. Default: on a terminal.
    output : bool
        Show lines that ranks print during a call, with their rank, on this process's stdout
        and stderr.
    verbose : bool
        Print the workers, the libraries that are loaded, the matrices that move, and each call
        with its arguments and its time.
    buffer_bytes : int, optional
        At most this many bytes of an array of this process are sent or fetched in one step.
        Smaller steps mean more messages. Default: 64 MiB, or a whole array up to 512 MiB.
    """

    address: str | None = field(default=None, metadata=HERE)
    token: str | None = field(default=None, metadata=HERE, repr=False)
    progress: bool | None = field(default=None, metadata=HERE)
    output: bool = field(default=True, metadata=HERE)
    verbose: bool = field(default=False, metadata=HERE)
    buffer_bytes: int | None = field(default=None, metadata=HERE)

    def __post_init__(self) -> None:
        checked_flag("verbose", self.verbose)
        if self.buffer_bytes is not None:
            positive_int("buffer_bytes", self.buffer_bytes)
        checked_flag("progress", self.progress, optional=True)
        checked_flag("output", self.output)


@dataclass(frozen=True)
class AttachOptions(ConnectionOptions):
    """The gang of another process that a session uses; see `AlchemistSession.attach`."""

    name: str = ""
    _: KW_ONLY
    timeout_s: float = START_TIMEOUT_S

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.name, str):
            raise SessionError(
                f"name={self.name!r}: the name of a gang is a string; AlchemistSession.list() has "
                "the names"
            )
        checked_seconds("timeout_s", self.timeout_s, most=MAX_SECONDS)


@dataclass(frozen=True)
class GangOptions(ConnectionOptions):
    """The gang that a session starts.

    Parameters
    ----------
    num_workers : int or (int, int), optional
        MPI ranks to start at once; see `request_workers`. Default: none, until then.
    name : str, optional
        Name of the gang, unique in the Ray cluster: other processes `attach` by it.
    lifetime : {"process", "detached"}
        ``"process"``: the gang ends with the session, or with this process. ``"detached"``: it
        stays, with its matrices and libraries, until `stop_gang`; it needs a name.
    idle_timeout_s : float, optional
        End the gang after this many seconds without a command of any process.
    max_failures : int
        How often the gang is started again after the loss of a rank or a node, with its libraries
        and the matrices that can be rebuilt (``docs/recovery.md``). Default: never.
    checkpoint_folder : path_like, optional
        A folder that all nodes see. `checkpoint` writes the gang's matrices there; with
        `max_failures` the gang also does it itself, when repeating its commands would cost more.
    placement : {"own", "inherit"} or Reservation
        ``"own"`` reserves CPUs in the cluster for the ranks. ``"inherit"`` runs them on the CPUs
        of the Ray task or actor that creates the session. A `Reservation` uses bundles of an
        existing placement group (`alchemist_ray.cluster.placement.within`).
    strategy : {"PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"}
        Ray's placement strategy for the ranks: few nodes, many nodes, one node, one node per
        rank. The strict ones are satisfied or refused. Only with ``placement="own"``.
    threads_per_worker : int
        Threads of each rank: its ``OMP_NUM_THREADS``, ``OPENBLAS_NUM_THREADS`` and
        ``MKL_NUM_THREADS``. This process's own variables do not reach the ranks.
    env : dict of str to str, optional
        Environment variables of the ranks, set before they import anything of yours
        (``docs/your-code.md``, which lists what is imported earlier).
    cpus_per_worker : float, optional
        CPUs reserved for each rank. Default: `threads_per_worker`.
    gpus_per_worker : float
        GPUs reserved for each rank, which sees no others. A fraction below 1: ranks share one.
    gpu : {"auto", "off"}
        Whether shipped libraries compute large products on the ranks' GPUs (``docs/gpus.md``).
    launcher : {"auto", "pmi", "mpiexec", "srun", "pals", "aprun", "hydra"}
        How ranks are started: forked on each node (pmi), by mpiexec on one machine, or on many
        nodes by a site's launcher (`alchemist_ray.launchers`). ``"auto"`` takes the value of
        the environment variable ``ALCHEMIST_LAUNCHER``, which a site file may set, else pmi.
    start_timeout_s : float
        Time limit for the start of a gang, in seconds.
    mpi_waits : {"interruptible", "plain"}
        Whether waits in MPI end with their call, also those of native libraries
        (``docs/errors-and-failures.md``). ``"plain"``: MPI's own waits, which end with the gang.
    stuck_timeout_s : float
        End the gang if ranks have not returned this many seconds after their call has failed or
        was cancelled: they run native code that calls neither MPI nor ``alchemist_check``, or
        code that cleans up.
    """

    num_workers: Workers | None = field(default=None, metadata=HERE)
    _: KW_ONLY
    name: str | None = None
    lifetime: str = PROCESS
    idle_timeout_s: float | None = None
    max_failures: int = field(default=0, metadata=IN_CLUSTER)
    checkpoint_folder: str | os.PathLike[str] | None = field(default=None, metadata=IN_CLUSTER)
    placement: Any = field(
        default="own",
        metadata={"in_cluster": "placement is not possible through a gateway: use placement='own'"},
    )
    strategy: str = "PACK"
    threads_per_worker: int = 1
    env: Mapping[str, str] | None = field(default=None, hash=False, repr=False)
    cpus_per_worker: float | None = None
    gpus_per_worker: float = 0
    gpu: str = "auto"
    launcher: str = "auto"
    start_timeout_s: float = START_TIMEOUT_S
    mpi_waits: str = "interruptible"
    stuck_timeout_s: float = STUCK_S

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers is not None:
            checked_workers(self.num_workers)
        checked_choice("lifetime", self.lifetime, (PROCESS, DETACHED))
        checked_choice("mpi_waits", self.mpi_waits, ("interruptible", "plain"))
        if self.name is not None:
            _check_name(self.name)
        elif self.detached:
            raise ValueError(
                f"lifetime='{DETACHED}' requires name=, by which other programs attach"
            )
        if self.idle_timeout_s is not None:
            checked_seconds("idle_timeout_s", self.idle_timeout_s)
        positive_int("max_failures", self.max_failures, least=0)
        if self.checkpoint_folder is not None:
            object.__setattr__(self, "checkpoint_folder", _folder(self.checkpoint_folder))
        if isinstance(self.placement, str):
            checked_choice("placement", self.placement, PLACEMENTS)
        checked_choice("strategy", self.strategy, STRATEGIES)
        if self.strategy != "PACK" and self.placement != "own":
            raise ValueError(
                f"strategy={self.strategy!r} applies only with placement='own': otherwise "
                "the CPUs are reserved already"
            )
        if self.detached and self.placement != "own":
            raise ValueError(
                "lifetime='detached' needs placement='own': a detached gang outlives its caller"
            )
        positive_int("threads_per_worker", self.threads_per_worker)
        object.__setattr__(self, "env", checked_env(self.env))
        if self.cpus_per_worker is not None:
            checked_cpus("cpus_per_worker", self.cpus_per_worker)
        checked_gpus("gpus_per_worker", self.gpus_per_worker)
        checked_choice("gpu", self.gpu, ("auto", "off"))
        if not isinstance(self.launcher, str):
            raise ValueError(f"launcher={self.launcher!r}: it must be a string")
        checked_seconds("start_timeout_s", self.start_timeout_s, most=MAX_SECONDS)
        checked_seconds("stuck_timeout_s", self.stuck_timeout_s, most=MOST_STUCK_S)

    @property
    def detached(self) -> bool:
        """Whether the gang outlives the process that started it."""
        return self.lifetime == DETACHED

    def with_env(self, env: Mapping[str, str] | None) -> GangOptions:
        """The options with further variables of the ranks. Raises `ValueError`."""
        return self if env is None else replace(self, env={**(self.env or {}), **checked_env(env)})

    @property
    def lease_grace_s(self) -> float:
        """Seconds for which a process that lost its connection keeps its matrices."""
        return DETACHED_GRACE_S if self.detached else 0.0

    @property
    def each(self) -> RankResources:
        """The resources to reserve for each rank."""
        cpus = float(self.cpus_per_worker or self.threads_per_worker)
        return RankResources(cpus, float(self.gpus_per_worker))

    def for_gateway(self) -> dict[str, Any]:
        """The options that a gateway takes. Raises `ValueError` for others that are given."""
        for option in fields(self):
            if "in_cluster" in option.metadata and getattr(self, option.name) != option.default:
                raise ValueError(option.metadata["in_cluster"])
        return {name: getattr(self, name) for name in through_gateway()}


def through_gateway() -> tuple[str, ...]:
    """Names of the options that a client of a gateway can give."""
    return tuple(option.name for option in fields(GangOptions) if not option.metadata)


def with_options(
    options: Callable[P, O], owner: str
) -> Callable[[Callable[[Any, O], R]], Callable[Concatenate[Any, P], R]]:
    """Decorate a function of (first, options): callers pass the options as arguments.

    `first` is self, cls, or the function that `mpi_function` decorates (None if it is not given).
    """

    def decorated(method: Callable[[Any, O], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def called(self: Any = None, /, *args: P.args, **given: P.kwargs) -> R:
            return method(self, options(*args, **given))

        own, taken = inspect.signature(method), inspect.signature(options)
        first = next(iter(own.parameters.values()))
        called.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[first, *taken.parameters.values()]
        )
        return known_options(owner)(called)

    return decorated


def documented(*options: type) -> Callable[[type[O]], type[O]]:
    """Decorate a class: ``{options}`` in its docstring becomes the options' own descriptions."""
    texts = [inspect.cleandoc(kind.__doc__ or "").partition("----------\n")[2] for kind in options]
    text = "\n    ".join("\n".join(texts).splitlines())

    def decorated(owner: type[O]) -> type[O]:
        owner.__doc__ = (owner.__doc__ or "").replace("{options}", text)
        return owner

    return decorated


def checked_workers(value: Any) -> Workers:
    """A number of workers, or the fewest and the most. Raises `ResourceError`."""
    if not isinstance(value, tuple | list):
        positive_int("num_workers", value)
        return int(value)
    for number in value:
        positive_int("num_workers", number)
    if len(value) != 2 or value[0] > value[1]:
        raise ResourceError(
            f"num_workers={value!r}: give a number, or (fewest, most), for example (2, 8)"
        )
    return int(value[0]), int(value[1])


def least_of(workers: Workers) -> int:
    """The number of workers, or the fewest."""
    return workers if isinstance(workers, int) else workers[0]


def most_of(workers: Workers) -> int:
    """The number of workers, or the most."""
    return workers if isinstance(workers, int) else workers[1]


def _check_name(name: object) -> None:
    if not isinstance(name, str) or GANG_NAME.fullmatch(name) is None:
        raise SessionError(
            "the name of a gang must have 1 to 64 letters, digits, '_', '-' and '.', and begin "
            f"with a letter or digit; got {name!r}"
        )


def _folder(path: str | os.PathLike[str]) -> str:
    folder = str(checked_path("checkpoint_folder", path, ValueError))
    if "://" in str(path):
        raise ValueError(f"checkpoint_folder={path!r}: it must be a folder, not a URL")
    return folder
