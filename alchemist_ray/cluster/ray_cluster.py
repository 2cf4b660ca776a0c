"""The Ray cluster of a session: which one it joins, and which it never joins.

A head is asked for its version first, with a time limit.

A session joins the cluster of its own process (`ray.init`, a Ray worker, a batch job), the one
that `RAY_ADDRESS` names, or a head that runs on this machine as this user: one in Ray's folder
(that of ``RAY_TMPDIR``, if it is set), or, without ``RAY_TMPDIR`` or with ``RAY_ADDRESS=auto``, any
that ``ray start`` has started. Where such a head runs and cannot be joined, an error says so.

A cluster of another user is never joined: its owner could run code here, and would run functions
and data of this user there. Where there is no such cluster, a session starts one of its own, whose
session folder no other user can read.

`ray.init` of an address that is dead, of another version or behind a token takes a minute, or
ends the process. These are two gRPC calls to the GCS.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import grpc
import psutil
import ray
import ray._private.parameter
import ray._raylet
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from alchemist_ray.arguments import THREAD_VARIABLES
from alchemist_ray.cluster.batch_job import adopt
from alchemist_ray.errors import AuthError, LaunchError, SessionError
from alchemist_ray.tracebacks import without_native_frames
from mpi_workers.node.processes import descendants, physical_cores
from mpi_workers.node.specs import RANK_VARIABLE

PROBE_TIMEOUT_S = 4.0
NO_ANSWER = "no answer"
_messages: Any = gcs_service_pb2  # made at import time: type checkers do not see them
_native: Any = ray._raylet
OPTIONS = (("grpc.enable_http_proxy", 0),)  # as Ray's own: a site's proxy does not reach its nodes
METADATA_NAMESPACE, METADATA_KEY = b"cluster", b"CLUSTER_METADATA"


def _reason(error: grpc.RpcError) -> str:
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer in {PROBE_TIMEOUT_S:.0f} s"
    return str(error.details()).rpartition(": ")[2] or str(error.code())


def _token() -> tuple[tuple[str, str], ...]:
    """Ray's token as call metadata, as far as this process has one."""
    loader = _native.AuthenticationTokenLoader.instance()
    if not loader.has_token():
        return ()
    return tuple((str(k).lower(), v) for k, v in loader.get_token_for_http_header().items())


ATTEMPTS = 3  # to start Ray: on a busy machine one of its processes may end after 15 s
LAPTOP_CPUS = 4  # a Ray that a session starts has room for at least this many workers
ADDRESS_VARIABLE = "RAY_ADDRESS"
AUTO = "auto"  # any cluster of this machine
TMPDIR_VARIABLE = "RAY_TMPDIR"
NICENESS_VARIABLE = "RAY_worker_niceness"
SOCKET_PATH_LIMIT = 107  # bytes of the path of a Unix socket
RAY_FOLDER = "r"  # in the private folder: Ray opens its own folder to every user
# Below it, as long as such paths get.
SOCKET_PATH = "r/session_2026-11-22_00-00-00_000000_0000000/sockets/plasma_store"
START_TIMEOUT_S = 60.0  # Ray gives its node 30 s
SLOW_START_S = 8.0  # a start that takes longer is reported
BUSY_LOAD = 2.5  # runnable programs per core; the start of Ray itself makes 1 to 1.5
CPU_PARTS = 10_000  # Ray divides a CPU into these
WATCH_INTERVAL_S = 0.2  # between looks at Ray's processes while they start
DAEMONS = ("raylet", "gcs_server")
QUOTED_LINES = 12  # of the log of a process that did not start

log = logging.getLogger(__name__)
_joining = threading.RLock()  # `ray.init` in two threads ends the program


def join_named(address: str | None) -> None:
    """Join the cluster of an address (``host:port``). Raises `SessionError` in another one."""
    if address is None:
        return
    with _joining:
        if not ray.is_initialized():
            check(address, f"the address {address}")
            ray.init(address=address)
    current = ray.get_runtime_context().gcs_address
    if current != address:
        raise SessionError(
            f"this process is in the Ray cluster at {current}, not at {address}: call "
            "ray.shutdown() before making the session. The address of a gateway begins with "
            "alchemist://"
        )


def join_ray(workers: int | None, *, start: bool = True, limit_s: float = START_TIMEOUT_S) -> bool:
    """Join a Ray cluster, or start one; whether one was started. Safe for use by several threads.

    A new one has a CPU for every core, and at least `LAPTOP_CPUS` (or `workers`): on a small
    machine ranks share cores. `limit_s`: for its start, see `start_ray`.

    Raises
    ------
    SessionError
        If the cluster that `RAY_ADDRESS` names, or that `ray start` has started here, does not
        answer, or has another version of Ray or Python. Without `start`, also if no cluster runs.
    AuthError
        If that cluster requires a token that this process does not have.
    LaunchError
        If a new one does not start in time.
    """
    with _joining:
        started = _joined(workers, start, limit_s)
    _no_abort_after_sigterm()
    return started


def _no_abort_after_sigterm() -> None:
    """Give this program the time that it needs after SIGTERM to save its state and to end.

    1. `ray.init` sets a handler, which exits.
    2. It sets abseil's handler of failures over it, which calls the first one, and aborts the
       program 3 s later.
    3. Setting the first one again removes the second.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _joined(workers: int | None, start: bool, limit_s: float) -> bool:
    if ray.is_initialized():
        return False
    tighten()
    if adopt(os.environ):
        raise SessionError(
            "this job's Ray requires its token, and ray was imported before the token was known: "
            "import alchemist_ray before ray, or start the program with `alchemist slurm run -- "
            "...`"
        )
    level = logging.INFO if start else logging.WARNING  # commands print their own lines only
    given = os.environ.get(ADDRESS_VARIABLE, "")
    if RANK_VARIABLE in os.environ and not given:  # each rank would start a Ray of its own
        raise SessionError(
            "this process is an MPI rank or was started by one, and is in no Ray cluster: make the "
            "session or Executor in the program that calls the ranks, and pass handles or arrays "
            "to the call. AlchemistSession(address='alchemist://...') needs no Ray; to join a "
            "cluster from here, set RAY_ADDRESS"
        )
    if given not in ("", AUTO, "local"):
        check(given, f"{ADDRESS_VARIABLE}={given}")
        _init(given, level)
        return False
    for head in heads() if given != "local" else ():
        try:
            check(head.address, f"the Ray head at {head.address} ({head.folder})")
        except (SessionError, AuthError) as error:
            if head.by_command and error.facts.get("cause") != NO_ANSWER:
                raise type(error)(
                    f"{error}. RAY_ADDRESS=local starts a Ray cluster of this program's own"
                ) from None
            log.warning("%s. It is not joined", error)
            continue
        _init(head.address, level)
        log.info("joined the Ray cluster at %s", head.address)
        return False
    if not start or given == AUTO:  # Ray starts none either
        raise SessionError(
            "no Ray cluster of this user runs on this machine: set RAY_ADDRESS"
            f"{' to that of one' if given == AUTO else ''}, or start one with `ray start --head`"
        )
    start_ray(max(os.cpu_count() or 1, LAPTOP_CPUS, workers or 0), limit_s)
    return True


def _init(address: str, level: int) -> None:
    try:
        ray.init(address=address, logging_level=level)
    except ConnectionError as error:
        raise SessionError(
            f"{error}: its GCS answers, but no raylet of this cluster runs on this machine. "
            f"`ray start --address={address}` starts one"
        ) from None


def start_ray(cpus: int, limit_s: float = START_TIMEOUT_S) -> None:
    """Start a Ray cluster for this process, in a folder that only this user can enter.

    Ray gives up after 30 s. The start is repeated, if half of `limit_s` is left, or, as soon as one
    of Ray's processes has ended, any of it.

    Linux ends Ray's processes with the thread that has started them. If the caller is not the main
    thread, a thread that does not end starts them.
    """
    if threading.current_thread() is threading.main_thread():
        _start(cpus, limit_s)
        return
    started: Future[None] = Future()

    def start_and_stay() -> None:
        try:
            _start(cpus, limit_s)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        threading.Event().wait()

    threading.Thread(target=start_and_stay, name="alchemist-ray", daemon=True).start()
    started.result()


def _start(cpus: int, limit_s: float) -> None:
    folder = private_folder()
    # Ray's own 15 gives ranks a third of a core that another program uses.
    options: dict[str, Any] = {
        "_system_config": {"worker_niceness": int(os.environ.get(NICENESS_VARIABLE, "0"))}
    }
    if folder is not None:
        options["_temp_dir"] = str(folder)
    begun = time.monotonic()
    with suppress(OSError):  # Ray makes it for everyone, with the token in it
        Path("~/.ray").expanduser().mkdir(mode=0o700)
    tighten()
    for attempt in range(ATTEMPTS):
        others = descendants([os.getpid()])
        watch = _StartWatch(others, folder or _ray_folder(), agent=attempt == 0)
        services, parameter = cast(Any, ray._private.services), cast(Any, ray._private.parameter)
        get_node, params = services.get_node, parameter.RayParams
        try:
            services.get_node = watch.until_died(get_node)
            if attempt:  # the raylet waits for the file of a port that the agent chooses
                parameter.RayParams = partial(params, runtime_env_agent_port=_free_port())
            # Without "local", Ray joins the cluster that a file in its folder names, also another
            # user's.
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
            break
        except Exception as error:  # Ray has no type of its own for it
            taken = time.monotonic() - begun
            why = watch.died or f"{error}. {_logs_of(folder or _ray_folder())}"
            said = f"Ray did not start in {taken:.0f} s: {why}"
            ray.shutdown()
            watch.end_all()
            if attempt == ATTEMPTS - 1 or taken > (limit_s if watch.died else limit_s / 2):
                raise LaunchError(said) from (None if watch.died else error)
            log.warning(
                "%s\nRay is started once more, without its dashboard agent and its metrics",
                said.rstrip(),
            )
        finally:
            services.get_node, parameter.RayParams = get_node, params
            watch.over.set()
    tighten()
    log.info("started a Ray cluster at %s", ray.get_runtime_context().gcs_address)


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# On a busy machine the raylet ends while it waits for these, which its dashboard agent writes after
# some 15 s of imports. With -1 the raylet goes on without the agent, as in a minimal installation.
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


class _StartWatch:
    """Reports a slow start of Ray, and at once a process that dies: `ray.init` waits for 30 s.

    Parameters
    ----------
    others : collection of int
        Processes that are not of this start.
    folder : Path
        Ray's.
    agent : bool
        Whether the raylet waits for its dashboard agent, which exports metrics.

    Attributes
    ----------
    died : str
        Which process has ended, and the end of its log; empty if none has.
    over : Event
        Ends the watch.
    """

    def __init__(self, others: Collection[int], folder: Path, *, agent: bool) -> None:
        self._agent = agent
        self.died = ""
        self.over = threading.Event()
        self._others = set(others)
        self._folder = folder
        self._seen = set[psutil.Process]()
        threading.Thread(target=self._watch, name="alchemist-ray-start", daemon=True).start()

    def until_died(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which waits for a node in native code, until a process has died."""

        def waited(*args: Any) -> Any:
            answer: Future[Any] = Future()

            def ask() -> None:
                try:
                    answer.set_result(wait(*args))
                except Exception as error:
                    answer.set_exception(error)

            threading.Thread(target=ask, name="alchemist-ray-node", daemon=True).start()
            while not self.died:
                with suppress(FutureTimeoutError):
                    return answer.result(WATCH_INTERVAL_S)
            raise LaunchError(self.died)

        return waited

    def end_all(self) -> None:
        """End the processes of a Ray that did not start: `ray.shutdown` does not know them.

        The agents of a raylet outlive it, and are no children of this process then.
        """
        for process in self._started():
            with suppress(psutil.Error):
                process.kill()

    def _started(self) -> set[psutil.Process]:
        """Ray's processes that have been seen; agents change their command lines later."""
        for pid in descendants([os.getpid()]) - self._others:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if str(self._folder) in " ".join(process.cmdline()):
                    self._seen.add(process)
        return set(self._seen)

    def _watch(self) -> None:
        begun = time.monotonic()
        running = dict[int, str]()
        slow = True
        while not self.over.wait(WATCH_INTERVAL_S) and not self.died:
            alive = set[int]()
            for process in self._started():
                with suppress(psutil.Error):  # it has ended
                    if process.name() == "raylet" and not self._agent:
                        _go_on_without_agent(process.cmdline())
                    if process.name() in DAEMONS:
                        running[process.pid] = process.name()
                        if process.status() != psutil.STATUS_ZOMBIE:
                            alive.add(process.pid)
            for pid, name in running.items():
                if pid not in alive:
                    self.died = f"its {name} has ended. {_logs_of(self._folder, name)}"
                    log.warning("Ray does not start: %s", self.died)
                    break
            if slow and time.monotonic() > begun + SLOW_START_S:
                logs = _session_of(self._folder) / "logs"
                log.warning(
                    "Ray has been starting for %.0f s; its logs are in %s", SLOW_START_S, logs
                )
                slow = False


def _go_on_without_agent(raylet: Sequence[str]) -> None:
    words = dict(word.split("=", 1) for word in raylet if "=" in word)
    for name in AGENT_PORTS:
        with (
            suppress(OSError, KeyError),
            open(Path(words["--session_dir"], f"{name}_{words['--node_id']}"), "x") as file,
        ):
            file.write("-1")


def _session_of(folder: Path) -> Path:
    """The folder of the Ray that this process starts: `session_latest` may be another program's."""
    ours = folder.glob(f"session_*_{os.getpid()}")
    return max(ours, default=folder / "session_latest")  # named by time


def _logs_of(folder: Path, *names: str) -> str:
    """The end of the first log of Ray's daemons, or of these, that says something."""
    logs = _session_of(folder) / "logs"
    for name in names or DAEMONS:
        for suffix in ("err", "out"):
            with suppress(OSError):
                text = (logs / f"{name}.{suffix}").read_text(errors="replace")
                if lines := without_native_frames(text).splitlines():
                    last = "\n".join(lines[-QUOTED_LINES:])
                    return f"The end of {logs / name}.{suffix}:\n{last}\n"
    return f"{logs} has no log of {' or '.join(names or DAEMONS)}"


def shared_cpus(workers: int, cpus: float) -> float:
    """CPUs to reserve for each rank, at most `cpus`.

    The Ray that a session has started got its number of CPUs from that session. A later session
    with more ranks is not refused: they share the CPUs.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    ours = tuple(f"{folder}/{RAY_FOLDER}/" for folder in _own_folders())
    if len(nodes) != 1 or not nodes[0]["RayletSocketName"].startswith(ours):
        return cpus
    share = nodes[0]["Resources"].get("CPU", 0.0) / workers
    return min(cpus, int(share * CPU_PARTS) / CPU_PARTS) or cpus


@cache
def warn_of_shared_cores(ranks: int, threads: int) -> None:
    """One warning, if this machine has fewer cores than the ranks that it runs have threads.

    Or if others keep its cores busy: one rank of several that has none keeps all others waiting.
    """
    cores, load = physical_cores(), os.getloadavg()[0]
    if ranks * threads > cores:
        log.warning(
            "%d ranks of %d thread%s share the %d physical cores of this machine: each step waits "
            "for the slowest. For speed use num_workers=%d, or a machine with more cores",
            ranks, threads, "" if threads == 1 else "s", cores, max(1, cores // threads),
        )  # fmt: skip
    elif ranks > 1 and load > BUSY_LOAD * cores:
        log.warning(
            "other programs use the %d cores of this machine (load %.1f): each step of %d ranks "
            "waits for the slowest. One rank may be faster",
            cores, load, ranks,
        )  # fmt: skip


def tell_threads(threads: int, env: Mapping[str, str]) -> None:
    """Warn once if this program was told another number of threads, which ranks do not get.

    Ray sets that number for its own workers.
    """
    told = os.environ.get(THREAD_VARIABLES[0], "")
    driver = ray.get_runtime_context().worker.mode == ray.SCRIPT_MODE
    if driver and THREAD_VARIABLES[0] not in env and told.isdecimal() and int(told) != threads:
        _warn_of_threads(told, threads)


@cache
def _warn_of_threads(told: str, threads: int) -> None:
    log.warning(
        "%s=%s of this program does not reach the ranks, which have threads_per_worker=%d each: "
        "threads_per_worker=%s sets it, and reserves as many CPUs",
        THREAD_VARIABLES[0], told, threads, told,
    )  # fmt: skip


def check(address: str, what: str) -> None:
    """Check that this process can join a cluster, in `PROBE_TIMEOUT_S` at most.

    Raises
    ------
    SessionError
        If the head at ``host:port`` does not answer (fact `cause` is `NO_ANSWER`), or is of another
        version of Ray or Python.
    AuthError
        If it requires a token that this process does not have.
    """
    if "://" in address:
        raise SessionError(
            f"{what} is not the address of a Ray head (host:6379): sessions exchange data with the "
            "ranks directly, which neither Ray Client nor the job server allows. Submit the "
            "program with `ray job submit`"
        )
    request = _messages.InternalKVGetRequest(namespace=METADATA_NAMESPACE, key=METADATA_KEY)
    try:
        with grpc.insecure_channel(address, OPTIONS) as channel:
            values = gcs_service_pb2_grpc.InternalKVGcsServiceStub(channel)
            reply = values.InternalKVGet(request, timeout=PROBE_TIMEOUT_S, metadata=_token())
        facts = json.loads(reply.value)
        check_versions(facts["ray_version"], facts["python_version"], what)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise AuthError(
                f"{what} requires a token, and this process has none: set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN_PATH to the file with the cluster's token"
            ) from None
        raise _no_head(what, _reason(error)) from None
    except (ValueError, KeyError, TypeError):
        raise _no_head(what, "it has no metadata of a cluster") from None


def _no_head(what: str, why: str) -> SessionError:
    return SessionError(
        f"{what} does not answer as a Ray head ({why}): is the cluster up, and is the port that of "
        "its GCS (6379 by default)?",
        cause=NO_ANSWER,
    )


def check_versions(ray_version: str, python_version: str, what: str) -> None:
    """Raise `SessionError` if a cluster is of another version than this process."""
    own = platform.python_version()
    if ray_version != ray.__version__:
        raise SessionError(
            f"{what} runs Ray {ray_version}, and this process has Ray {ray.__version__}: install "
            "the same version"
        )
    if python_version.split(".")[:2] != own.split(".")[:2]:
        raise SessionError(
            f"{what} runs Python {python_version}, and this process runs {own}: use the same minor "
            "version"
        )


# --- heads on this machine ---


@dataclass(frozen=True, slots=True)
class Head:
    """A Ray cluster of this user with a raylet on this machine.

    Attributes
    ----------
    address : str
    folder : Path
        Ray's ``--temp-dir``.
    by_command : bool
        Whether ``ray start`` has started it, not a program's ``ray.init`` or a batch job.
    """

    address: str
    folder: Path
    by_command: bool


def own_head() -> str | None:
    """Address of the first of `heads`."""
    return next((head.address for head in heads()), None)


def heads() -> list[Head]:
    """The clusters that a session joins unasked, the first choice first; warns about others."""
    found = _running()
    near = [_ray_folder(), _default_folder() / RAY_FOLDER, _short_folder() / RAY_FOLDER]
    if given := os.environ.get(TMPDIR_VARIABLE):
        private = private_folder()
        near = [_ray_folder(), Path(given).resolve(), *([] if private is None else [private])]
    chosen = [head for head in found if head.folder in near]
    others = [head for head in found if head.by_command and head not in chosen]
    if not given or os.environ.get(ADDRESS_VARIABLE) == AUTO:
        return chosen + others
    for head in others if not chosen else ():
        log.warning(
            "a Ray head of this user runs at %s in %s. It is not joined, as RAY_TMPDIR=%s: set "
            "RAY_ADDRESS=%s to join it", head.address, head.folder, given, head.address,
        )  # fmt: skip
    return chosen


def _running() -> list[Head]:
    found: dict[str, Head] = {}
    for process in psutil.process_iter(["uids", "cmdline", "ppid"]):
        argv = process.info["cmdline"] or [""]
        if Path(argv[0]).name != "raylet" or process.info["uids"].real != os.getuid():
            continue
        options = dict(
            part.removeprefix("--").partition("=")[::2] for arg in argv for part in arg.split()
        )
        folder = options.get("temp_dir") or options.get("temp-dir")
        if folder and (address := options.get("gcs-address")):
            by_command = _is_command(process.info["ppid"])
            found.setdefault(address, Head(address, Path(folder).resolve(), by_command))
    return list(found.values())


def _is_command(parent: int) -> bool:
    """Whether a raylet with this parent is of ``ray start``.

    Programs stay the parent of the Ray that they start. ``ray start`` ends, or, with ``--block``,
    has "start" among its arguments.
    """
    try:
        argv = psutil.Process(parent).cmdline() or [""]
    except psutil.Error:  # it has ended
        return True
    return "python" not in Path(argv[0]).name or "start" in argv


# --- folders and tokens ---


def _ray_folder() -> Path:
    """Ray's own folder, where no other is given."""
    return Path(os.environ.get(TMPDIR_VARIABLE) or "/tmp").resolve() / "ray"


def _default_folder() -> Path:
    """The folder of the clusters that sessions of this user start."""
    return Path(tempfile.gettempdir()).resolve() / f"ray-{os.getuid()}"


def _short_folder() -> Path:
    return Path(f"/tmp/ray-{os.getuid()}")


def _own_folders() -> list[Path]:
    """Folders for the clusters that sessions of this user start, the first choice first."""
    given = os.environ.get(TMPDIR_VARIABLE)
    chosen = [Path(given).resolve() / f"ray-{os.getuid()}"] if given else []
    return [*chosen, _default_folder(), _short_folder()]


def private_folder() -> Path | None:
    """Ray's folder, in one of mode 700; None where Ray's default has to do.

    ``RAY_TMPDIR`` comes first, if its path is short enough for the Unix sockets below it.
    """
    fitting = [each for each in _own_folders() if len(f"{each}/{SOCKET_PATH}") <= SOCKET_PATH_LIMIT]
    folder = fitting[0] if fitting else _short_folder()
    with suppress(OSError):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError as error:
        log.warning("no private folder for Ray: %s: %s", folder, error.strerror)
        return None
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        log.warning("%s belongs to another user; other users can read this cluster's files", folder)
        return None
    if about.st_mode & 0o077:
        folder.chmod(0o700)
    return folder / RAY_FOLDER


def tighten() -> None:
    """Make Ray's token readable by its owner alone, or warn where it is not ours."""
    folder = Path("~/.ray").expanduser()
    for path, mode in ((folder, 0o700), (folder / "auth_token", 0o600)):
        try:
            about = path.stat()
        except OSError:
            continue
        if not about.st_mode & 0o077:
            continue
        if about.st_uid == os.getuid():
            path.chmod(mode)
        else:
            log.warning("%s can be read by other users and belongs to user %s", path, about.st_uid)
