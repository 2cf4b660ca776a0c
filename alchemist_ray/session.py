"""AlchemistSession: what a user holds."""

from __future__ import annotations

import atexit
import os
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError

from alchemist_ray import gang as gangs
from alchemist_ray import managers
from alchemist_ray.cluster import join_ray
from alchemist_ray.driver import find_driver
from alchemist_ray.errors import (
    AlchemistError,
    GroupError,
    LaunchError,
    LibraryNotFoundError,
    MatrixError,
    ResourceError,
    SessionError,
)
from alchemist_ray.gang import GangClient
from alchemist_ray.group import Endpoint, GangRequest
from alchemist_ray.handles import Handle
from alchemist_ray.launch import LAUNCHERS
from alchemist_ray.libraries import Library, named
from alchemist_ray.link import ask_manager, no_workers
from alchemist_ray.managers import Manager
from alchemist_ray.placement import PLACEMENTS, check_capacity, inherited

END_TIMEOUT_S = 15.0
MANAGER_TIMEOUT_S = 30.0  # for a GroupManager to be there, and to clear up after a failed start


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One rank of a gang: where it runs and how it is."""

    rank: int
    node_id: str
    hostname: str
    address: str
    pid: int
    status: str


class AlchemistSession:
    """A user's session: a gang of MPI ranks, the matrices on it, the libraries it runs.

    Parameters
    ----------
    num_workers : int, optional
        Request so many workers at once; else `request_workers` does it later.
    placement : {"own", "inherit"}
        Reserve CPUs for the ranks in the cluster, or run them inside the CPUs of
        the Ray task or actor that makes the session.
    threads_per_worker : int
        BLAS threads of each rank.
    cpus_per_worker : float, optional
        CPUs reserved for each rank. Default: `threads_per_worker`.
    launcher : {"pmi", "mpiexec"}
        How ranks are started: forked by us, or by a site's mpiexec (one machine).
    start_timeout_s : float
        Most seconds that the start of a gang may take.
    progress : bool, optional
        Show progress bars. Default: on a terminal, for what takes over a second.

    Raises
    ------
    ValueError
        For an option that is not one of those.
    ResourceError, LaunchError
        See `request_workers`.

    Notes
    -----
    Joins the Ray cluster that this process is in or that runs here; where there
    is none, starts one for this process.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        placement: str = "own",
        threads_per_worker: int = 1,
        cpus_per_worker: float | None = None,
        launcher: str = "pmi",
        start_timeout_s: float = 60.0,
        progress: bool | None = None,
    ) -> None:
        if placement not in PLACEMENTS:
            raise ValueError(f"placement={placement!r}: it is one of {', '.join(PLACEMENTS)}")
        if launcher not in LAUNCHERS:
            raise ValueError(f"launcher={launcher!r}: it is one of {', '.join(LAUNCHERS)}")
        _positive_int("threads_per_worker", threads_per_worker)
        self.id = f"s{uuid.uuid4().hex[:10]}"
        self._placement = placement
        self._launcher = launcher
        self._threads = threads_per_worker
        self._cpus = float(threads_per_worker if cpus_per_worker is None else cpus_per_worker)
        if self._cpus <= 0:
            raise ValueError(f"cpus_per_worker={cpus_per_worker}: it must be over 0")
        self._start_timeout_s = start_timeout_s
        self._progress = progress
        self._manager: Manager | None = None
        self._client: GangClient | None = None
        self._libraries: dict[str, Library] = {}
        self._closed = False
        self._started_ray = join_ray(num_workers)
        self._driver = find_driver()
        self._driver.prewarm.remote()
        self._manager = managers.take()
        _open.add(self)
        if num_workers is not None:
            try:
                self.request_workers(num_workers)
            except BaseException:
                self.close()
                raise

    def connect_to_alchemist(self, address: str, port: int) -> None:
        """Join the Ray cluster whose head listens at ``address:port`` (its GCS port).

        Raises
        ------
        SessionError
            If this process is in another cluster and cannot leave it.
        """
        self._check_open()
        wanted = f"{'127.0.0.1' if address == '0.0.0.0' else address}:{port}"
        current = ray.get_runtime_context().gcs_address
        if current == wanted or (
            wanted.startswith("127.") and current.rpartition(":")[2] == str(port)
        ):
            return
        if not self._started_ray or self._client is not None:
            raise SessionError(
                f"this process is in the Ray cluster at {current}, not at {wanted}: call "
                f"ray.shutdown() and ray.init(address={wanted!r}) before making the session"
            )
        ray.shutdown()
        ray.init(address=wanted, log_to_driver=True)
        self._started_ray = False
        self._driver = find_driver()
        self._manager = managers.take()

    # --- workers ---

    def request_workers(self, num_workers: int) -> list[WorkerInfo]:
        """Start a gang of `num_workers` MPI ranks and wait until it is ready.

        Returns
        -------
        list of WorkerInfo
            One per rank.

        Raises
        ------
        ResourceError
            If the cluster has not the CPUs; nothing was started.
        LaunchError
            If the ranks do not start in time; nothing of them is left.
        GroupError
            If the session has workers already.

        Notes
        -----
        After a gang was lost this starts the next; handles of the lost one are stale.
        """
        self._check_open()
        _positive_int("num_workers", num_workers)
        if self._client is not None and self._alive():
            raise GroupError(
                f"the session has {len(self._client.endpoint.workers)} workers already: "
                "yield_workers() first, or open another session"
            )
        if self._placement == "inherit":
            reservation = inherited(num_workers, self._cpus)
        else:
            check_capacity(num_workers, self._cpus)
            reservation = None
        self._drop_client()
        manager = self._live_manager()
        manager.epoch += 1
        request = GangRequest(
            workers=num_workers,
            threads=self._threads,
            cpus=self._cpus,
            launcher=self._launcher,
            start_timeout_s=self._start_timeout_s,
            inherited=reservation,
            epoch=manager.epoch,
            session=self.id,
        )
        limit_s = self._start_timeout_s + MANAGER_TIMEOUT_S
        try:
            endpoint: Endpoint = ask_manager(manager.actor.launch.remote(request), limit_s)
        except (KeyboardInterrupt, GetTimeoutError) as error:
            self._manager = None
            manager.kill()  # it goes on over there: what it has, and will have, ends with it
            if isinstance(error, KeyboardInterrupt):
                raise
            raise LaunchError(
                f"the gang's GroupManager gave no answer in {limit_s:.0f} s: has Ray no room for "
                "another process on this node, or is it stuck?"
            ) from None
        self._client = GangClient(endpoint, manager.actor, owner=True, progress=self._progress)
        gangs.attach(self._client)
        return self.list_workers()

    def yield_workers(self) -> None:
        """End the gang and give its CPUs back; its matrices are gone. The session stays open."""
        self._check_open()
        self._end_gang()

    def list_workers(self) -> list[WorkerInfo]:
        """The ranks of the gang: where each runs and whether it is idle or busy."""
        self._check_open()
        if self._client is None:
            return []
        known = self._client.endpoint.workers
        told = self._client.request({"op": "list_workers"})["workers"]
        return [
            WorkerInfo(
                rank=about["rank"],
                node_id=about["node_id"],
                hostname=about["hostname"],
                address=about["addresses"][-1],
                pid=about["pid"],
                status=now["status"],
            )
            for about, now in zip(known, told, strict=True)
        ]

    # --- matrices ---

    def send_matrix(
        self,
        matrix: Any,
        *,
        layout: str = "VC_STAR",
        name: str | None = None,
        dtype: Any = None,
        print_times: bool = False,
    ) -> Handle:
        """Send a matrix to the gang.

        Parameters
        ----------
        matrix : array_like, shape (m, n) or (m,), or list of (ObjectRef, int, int)
            A NumPy array (1-D: one column; any strides; may be read-only), or blocks
            in the Ray object store, each with the row and column of its first element,
            that together cover a matrix exactly once.
        layout : str
            How to spread it over the ranks: one of Elemental's 14 names.
        name : str, optional
            For people; shown by the handle.
        dtype : dtype, optional
            Convert to it on the way. Default: the matrix's own, if it is float32/64,
            complex64/128 or int32/64.
        print_times : bool
            Print where the time went, per worker.

        Returns
        -------
        Handle

        Raises
        ------
        DtypeError, ShapeError, LayoutError, IncompleteMatrixError
            Before anything is sent.
        ResourceError
            If the ranks' nodes have not the memory; before anything is sent.
        GroupFailedError, TransferError
            If a rank dies or is out of reach; nothing partial stays behind.

        Notes
        -----
        One copy on the same node (shared memory), one stream per rank to other nodes.
        A layout with copies is sent once and copied by the ranks over MPI.
        """
        return self._gang().send(
            matrix, layout=layout, name=name, dtype=dtype, print_times=print_times
        )

    def fetch_matrix(
        self,
        handle: Handle,
        *,
        rows: slice | int | None = None,
        cols: slice | int | None = None,
        print_times: bool = False,
    ) -> NDArray[Any]:
        """The elements of a matrix, or of a part of it, as a NumPy array; see `Handle.fetch`."""
        client = self._gang()
        if not isinstance(handle, Handle):
            raise MatrixError(f"a {type(handle).__name__} is not a handle of a matrix")
        return client.fetch(handle, rows, cols, print_times=print_times)

    def list_matrices(self) -> list[Handle]:
        """Handles of all matrices that the gang holds."""
        client = self._gang()
        told = client.request({"op": "list_matrices"})["matrices"]
        return [client.handle(about) for about in told]

    # --- libraries ---

    def load_library(self, name: str, path: str | os.PathLike[str] | None = None) -> Library:
        """Load a library on every rank.

        Parameters
        ----------
        name : str
            A shipped library (``"linalg"``, ``"echo"``), an installed one, or, with
            `path`, any name.
        path : path_like, optional
            A Python file that every node of the gang can read.

        Raises
        ------
        LibraryNotFoundError, LibraryLoadError
        """
        client = self._gang()
        if not isinstance(name, str) or not name:
            raise LibraryNotFoundError(f"the name of a library is a string, not {name!r}")
        given = None if path is None else str(Path(path).expanduser().absolute())
        described = client.request({"op": "load", "library": name, "path": given})
        library = self._libraries[name] = Library(client, described)
        return library

    def list_libraries(self) -> list[str]:
        """Names of the libraries that are loaded."""
        return [d["name"] for d in self._gang().request({"op": "list_libraries"})["libraries"]]

    def run_task(self, library: Library | str, routine: str, *args: Any, **kwargs: Any) -> Any:
        """Call a routine of a loaded library by name; ``lib.routine(...)`` is the same."""
        self._gang()
        name = named(library)
        if name not in self._libraries:
            raise LibraryNotFoundError(
                f"library {name!r} is not loaded in this session: load_library({name!r}) first"
            )
        return self._libraries[name].routine(routine)(*args, **kwargs)

    # --- the end ---

    def close(self) -> None:
        """End the gang and the session. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        manager = self._manager if self._end_gang() else None
        if manager is not None:
            managers.give_back(manager)
        elif self._manager is not None:
            self._manager.kill()
        self._manager = None

    stop = close

    def __enter__(self) -> AlchemistSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "no workers"
        if self._client is not None:
            state = (
                f"{len(self._client.endpoint.workers)} workers, epoch {self._client.endpoint.epoch}"
            )
        return f"<AlchemistSession {self.id}: {state}>"

    # --- inside ---

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("the session is closed: open another AlchemistSession()")

    def _gang(self) -> GangClient:
        self._check_open()
        if self._client is None:
            raise no_workers()
        return self._client

    def _alive(self) -> bool:
        try:
            self._gang().request({"op": "list_workers"})
        except AlchemistError:
            return False
        return True

    def _live_manager(self) -> Manager:
        """The session's GroupManager; another one if it died."""
        if self._manager is None or not self._manager.alive():
            self._manager = managers.take()
        return self._manager

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        self._libraries.clear()
        if client is not None:
            client.close()

    def _end_gang(self) -> bool:
        """End the gang, if there is one; whether the manager is fit for another."""
        fit = self._manager is not None and ray.is_initialized()
        if self._client is not None and self._manager is not None and fit:
            try:
                ray.get(self._manager.actor.end.remote(), timeout=END_TIMEOUT_S)
            except Exception:  # it is going: an error has no one to help
                fit = False
        self._drop_client()
        return fit


_open: weakref.WeakSet[AlchemistSession] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for session in list(_open):
        session.close()


def _positive_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        kind = ResourceError if name == "num_workers" else ValueError
        raise kind(f"{name}={value!r}: it must be a whole number, at least 1")
