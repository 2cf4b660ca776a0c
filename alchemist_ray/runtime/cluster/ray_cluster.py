"""The Ray cluster of a session: which one it joins, and which it never joins.

A head is asked for its version first, with a time limit.

A session joins the cluster of its own process (`ray.init`, a Ray worker, a batch job), the one
that `RAY_ADDRESS` names, or a head that runs on this machine as this user from the same
``RAY_TMPDIR``. A cluster of another user is never joined: its owner could run code here, and
would run functions and data of this user there. Where there is no such cluster, a session starts
one of its own, whose session folder no other user can read.

`ray.init` of an address that is dead, of another version or behind a token takes a minute, or
ends the process. These are two gRPC calls to the GCS.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import stat
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import ray
import ray._raylet
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from alchemist_ray.errors import AuthError, SessionError
from alchemist_ray.runtime.cluster.batch_job import adopt

PROBE_TIMEOUT_S = 4.0
_messages: Any = gcs_service_pb2  # made at import time: type checkers do not see them
_native: Any = ray._raylet
OPTIONS = (("grpc.enable_http_proxy", 0),)  # as Ray's own: a site's proxy does not reach its nodes
METADATA_NAMESPACE, METADATA_KEY = b"cluster", b"CLUSTER_METADATA"


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The answer of a Ray head; `error` is empty if it answered."""

    ray_version: str = ""
    python_version: str = ""
    wants_token: bool = False
    error: str = ""


def probe(address: str) -> ClusterFacts:
    """Ask the head whose GCS listens at ``host:port``. Takes `PROBE_TIMEOUT_S` at most."""
    with grpc.insecure_channel(address, OPTIONS) as channel:
        values = gcs_service_pb2_grpc.InternalKVGcsServiceStub(channel)
        request = _messages.InternalKVGetRequest(namespace=METADATA_NAMESPACE, key=METADATA_KEY)
        try:
            reply = values.InternalKVGet(request, timeout=PROBE_TIMEOUT_S, metadata=_token())
            facts = json.loads(reply.value)
            return ClusterFacts(facts["ray_version"], facts["python_version"])
        except grpc.RpcError as error:
            refused = error.code() == grpc.StatusCode.UNAUTHENTICATED
            return ClusterFacts(wants_token=refused, error="" if refused else _reason(error))
        except (ValueError, KeyError, TypeError):
            return ClusterFacts(error="it has no metadata of a cluster")


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


LAPTOP_CPUS = 4  # a Ray that a session starts has room for at least this many workers
ADDRESS_VARIABLE = "RAY_ADDRESS"
TMPDIR_VARIABLE = "RAY_TMPDIR"
SOCKET_PATH_LIMIT = 107  # bytes of the path of a Unix socket
RAY_FOLDER = "r"  # in the private folder: Ray opens its own folder to every user
# Below it, as long as such paths get.
SOCKET_PATH = "r/session_2026-11-22_00-00-00_000000_0000000/sockets/plasma_store"

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


def finds_cluster() -> bool:
    """Whether a session joins a Ray cluster that runs, rather than start one."""
    given = os.environ.get(ADDRESS_VARIABLE, "")
    return (
        ray.is_initialized()
        or given not in ("", "auto", "local")
        or (given != "local" and own_head() is not None)
    )


def join_ray(workers: int | None, *, start: bool = True) -> bool:
    """Join a Ray cluster, or start one; whether one was started. Safe for use by several threads.

    A new one has a CPU for every core, and at least `LAPTOP_CPUS` (or `workers`): on a small
    machine ranks share cores.

    Raises
    ------
    SessionError
        If the cluster that `RAY_ADDRESS` names is not there, or is of another version of Ray or
        Python. Without `start`, also if there is no cluster.
    AuthError
        If that cluster requires a token that this process does not have.
    """
    with _joining:
        return _joined(workers, start=start)


def _joined(workers: int | None, *, start: bool) -> bool:
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
    if given not in ("", "auto", "local"):
        check(given, f"{ADDRESS_VARIABLE}={given}")
        ray.init(address=given, logging_level=level)
        return False
    found = own_head() if given != "local" else None
    if found is not None:
        try:
            check(found, f"the Ray head at {found}")
        except (SessionError, AuthError) as error:
            log.warning("%s. The session starts a Ray cluster of its own", error)
        else:
            ray.init(address=found, logging_level=level)
            log.info("joined the Ray cluster at %s", found)
            return False
    if not start:
        raise SessionError(
            "no Ray cluster of this user runs on this machine: set RAY_ADDRESS, or start one with "
            "`ray start --head`"
        )
    start_ray(max(os.cpu_count() or 1, LAPTOP_CPUS, workers or 0))
    return True


def start_ray(cpus: int) -> None:
    """Start a Ray cluster for this process, in a folder that only this user can enter.

    Linux ends Ray's processes with the thread that has started them. If the caller is not the main
    thread, a thread that does not end starts them.
    """
    if threading.current_thread() is threading.main_thread():
        _start(cpus)
        return
    started: Future[None] = Future()

    def start_and_stay() -> None:
        try:
            _start(cpus)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        threading.Event().wait()

    threading.Thread(target=start_and_stay, name="alchemist-ray", daemon=True).start()
    started.result()


def _start(cpus: int) -> None:
    tighten()
    folder = private_folder()
    options: dict[str, Any] = {} if folder is None else {"_temp_dir": str(folder)}
    # Without "local", Ray joins the cluster that a file in its folder names, also another user's.
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
    log.info("started a Ray cluster at %s", ray.get_runtime_context().gcs_address)


def check(address: str, what: str) -> None:
    """Raise `SessionError` or `AuthError`, in seconds, if this process cannot join a cluster."""
    if "://" in address:
        raise SessionError(
            f"{what} is not the address of a Ray head (host:6379): sessions exchange data with the "
            "ranks directly, which neither Ray Client nor the job server allows. Submit the "
            "program with `ray job submit`"
        )
    check_facts(probe(address), what)


def check_facts(facts: ClusterFacts, what: str) -> None:
    """Raise `SessionError` or `AuthError` if a cluster does not fit this process."""
    if facts.wants_token:
        raise AuthError(
            f"{what} requires a token, and this process has none: set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH to the file with the cluster's token"
        )
    if facts.error:
        raise SessionError(
            f"{what} does not answer as a Ray head ({facts.error}): is the cluster up, and is "
            "the port that of its GCS (6379 by default)?"
        )
    if facts.ray_version != ray.__version__:
        raise SessionError(
            f"{what} runs Ray {facts.ray_version}, and this process has Ray {ray.__version__}: "
            "install the same version"
        )
    own = platform.python_version()
    if facts.python_version.split(".")[:2] != own.split(".")[:2]:
        raise SessionError(
            f"{what} runs Python {facts.python_version}, and this process runs {own}: use the "
            "same minor version"
        )


# --- heads on this machine ---


def own_head() -> str | None:
    """Address of a Ray head of this user on this machine, started from the same RAY_TMPDIR."""
    wanted = Path(os.environ.get(TMPDIR_VARIABLE) or "/tmp/ray").resolve()
    folders = [wanted, _default_folder() / RAY_FOLDER, _short_folder() / RAY_FOLDER]
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if process.stat().st_uid != os.getuid():
                continue
            argv = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has just ended
        if Path(argv[0]).name != "raylet":
            continue
        options = dict(
            part.removeprefix("--").partition("=")[::2] for arg in argv for part in arg.split()
        )
        folder = options.get("temp_dir") or options.get("temp-dir", "")
        if folder and Path(folder).resolve() in folders and options.get("gcs-address"):
            return options["gcs-address"]
    return None


# --- folders and tokens ---


def _default_folder() -> Path:
    """The folder of the clusters that sessions of this user start."""
    return Path(tempfile.gettempdir()).resolve() / f"ray-{os.getuid()}"


def _short_folder() -> Path:
    return Path(f"/tmp/ray-{os.getuid()}")


def private_folder() -> Path | None:
    """Ray's folder, in one of mode 700; None where Ray's default has to do.

    ``RAY_TMPDIR`` comes first; it is a short path, as Unix sockets lie below it.
    """
    if os.environ.get(TMPDIR_VARIABLE):
        return None
    folder = _default_folder()
    if len(f"{folder}/{SOCKET_PATH}") > SOCKET_PATH_LIMIT:
        folder = _short_folder()
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
