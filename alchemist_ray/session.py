"""AlchemistSession: what a user holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.arrays.namespace import Namespace, namespace_of
from alchemist_ray.errors import LibraryNotFoundError, MatrixError
from alchemist_ray.functions import run as user_code
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.libraries import Library, Routine, named
from alchemist_ray.gang.rank_channel import RankChannel, open_rank_channel
from alchemist_ray.io.checkpoints import SessionCheckpoints
from alchemist_ray.io.session_files import SessionFiles
from alchemist_ray.runtime.gang_owner import WorkerInfo
from alchemist_ray.transfer import fetching, sending

__all__ = ["AlchemistSession", "WorkerInfo"]


class AlchemistSession(SessionFiles, SessionCheckpoints):
    """A user's session: a gang of MPI ranks, the matrices on it, the libraries it runs.

    Parameters
    ----------
    num_workers : int, optional
        Request so many workers at once; else `request_workers` does it later.
    placement : {"own", "inherit"} or Reservation
        Reserve CPUs for the ranks in the cluster, or run them inside the CPUs of
        the Ray task or actor that makes the session, or in bundles of a placement group
        that is there already (`alchemist_ray.runtime.placement.within`).
    strategy : {"PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"}
        Ray's ways to lay ranks over nodes (pods): few nodes, many nodes, one node, a node
        for each rank. The strict ones are kept or refused. With ``placement="own"``.
    threads_per_worker : int
        BLAS threads of each rank.
    cpus_per_worker : float, optional
        CPUs reserved for each rank. Default: `threads_per_worker`.
    launcher : {"auto", "pmi", "mpiexec", "srun", "pals", "aprun", "hydra"}
        How ranks are started: forked by us (pmi), by an mpiexec on one machine, or on many nodes
        by a site's own launcher (`alchemist_ray.launchers`). Default: what the environment's
        `ALCHEMIST_LAUNCHER` says, which a site file sets where the fabric needs it; else pmi.
    start_timeout_s : float
        Most seconds that the start of a gang may take.
    progress : bool, optional
        Show progress bars. Default: on a terminal, for what takes over a second.
    output : bool
        Show what ranks print during a call that is waited for, each line with its rank,
        on this process's stdout and stderr.

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

    _libraries_of: GangConnection | None = None
    _libraries: dict[str, Library]

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
        sent: Handle = sending.send(
            self.connection, matrix, layout=layout, name=name, dtype=dtype, print_times=print_times
        )
        return sent

    def fetch_matrix(
        self,
        handle: Handle,
        *,
        rows: slice | int | None = None,
        cols: slice | int | None = None,
        print_times: bool = False,
    ) -> NDArray[Any]:
        """The elements of a matrix, or of a part of it, as a NumPy array; see `Handle.fetch`."""
        connection = self.connection
        if not isinstance(handle, Handle):
            raise MatrixError(f"a {type(handle).__name__} is not a handle of a matrix")
        return fetching.fetch(connection, handle, rows, cols, print_times=print_times)

    def list_matrices(self) -> list[Handle]:
        """Handles of all matrices that the gang holds."""
        connection = self.connection
        told = connection.request({"op": "list_matrices"})["matrices"]
        return [connection.handle(about) for about in told]

    @property
    def xp(self) -> Namespace:
        """The array API standard for matrices of the gang: ``als.xp.ones((m, n))``, and more.

        What its functions make is temporary, see `Handle.keep`.

        Raises
        ------
        SessionError
            If there is no gang.
        """
        return namespace_of(self.connection)

    # --- libraries ---

    def load_library(self, name: str, path: str | os.PathLike[str] | None = None) -> Library:
        """Load a library on every rank.

        Parameters
        ----------
        name : str
            A shipped library (``"linalg"``, ``"echo"``), an installed one, or, with
            `path`, any name.
        path : path_like, optional
            A Python file, or a shared object that exports the C ABI (`ali/include/alchemist.h`),
            that every node of the gang can read; for ``"scalapack"`` and ``"elemental"`` theirs.

        Raises
        ------
        LibraryNotFoundError, LibraryLoadError
        """
        connection = self.connection
        if not isinstance(name, str) or not name:
            raise LibraryNotFoundError(f"the name of a library is a string, not {name!r}")
        given = None if path is None else str(Path(path).expanduser().absolute())
        described = connection.request({"op": "load", "library": name, "path": given})
        library = Library(connection, described)
        self._loaded()[name] = library
        return library

    def list_libraries(self) -> list[str]:
        """Names of the libraries that are loaded."""
        return [d["name"] for d in self.connection.request({"op": "list_libraries"})["libraries"]]

    def run_task(self, library: Library | str, routine: str, *args: Any, **kwargs: Any) -> Any:
        """Call a routine of a loaded library by name; ``lib.routine(...)`` is the same."""
        name = named(library)
        loaded = self._loaded()
        if name not in loaded:
            raise LibraryNotFoundError(
                f"library {name!r} is not loaded in this session: load_library({name!r}) first"
            )
        return loaded[name].routine(routine)(*args, **kwargs)

    def open_rank_channel(self, serve: Routine, timeout_s: float = 10.0) -> RankChannel | None:
        """Channels to the ranks for a routine that serves, see `alchemist_ray.gang.rank_channel`.

        The routine holds the gang until the lines are closed: no other command is done.

        Raises
        ------
        GroupFailedError
            If the gang is lost.
        """
        connection = self.connection
        return open_rank_channel(serve, connection.cancel, connection.address, timeout_s)

    def _loaded(self) -> dict[str, Library]:
        """Libraries by name; a new gang has none."""
        connection = self.connection
        if self._libraries_of is not connection:
            self._libraries_of, self._libraries = connection, {}
        return self._libraries

    # --- code of one's own ---

    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a Python function on every rank at once, as ``function(comm, *args, **kwargs)``.

        Parameters
        ----------
        function : callable
            Its first parameter is the gang's communicator (an `mpi4py.MPI.Intracomm`
            whose waits end when another rank fails). Functions and classes of modules
            of your own travel with it; what it imports must be installed on the nodes.
        *args, **kwargs
            Its other arguments. A handle, anywhere in them, is this rank's part of the
            matrix (`ali.DistMatrix`); a Ray ObjectRef becomes its value; the rest is copied
            to every rank, so send what is large as a matrix.
        timeout_s : float, optional
            Most seconds that the call may take, with the time it waits for others.

        Returns
        -------
        object
            What the function returns on rank 0: NumPy arrays and plain values, in lists,
            tuples and dicts as well. A DistMatrix in it, which every rank must return,
            comes as a `Handle`, and its elements stay where they are.

        Raises
        ------
        BadArgumentError
            If the function is none, or it or an argument cannot be pickled; before anything
            moves.
        MatrixNotFoundError, StaleHandleError
            For handles of matrices that this gang has not, or no more.
        RoutineError
            If it raises on a rank, with that rank's traceback; the gang goes on.
        CallTimeoutError
            If it took too long, and was cancelled. Ctrl-C cancels it too.
        GroupFailedError
            If a rank dies.

        Notes
        -----
        ``ali.context()`` inside of the function is what a routine of a library has as its
        first parameter: new matrices, layouts, progress, cancellation. Nothing is kept
        from one run to the next.
        """
        return user_code.run(self.connection, function, args, kwargs, timeout_s)

    def run_script(
        self,
        path: str | os.PathLike[str],
        argv: Sequence[Any] = (),
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Run an mpi4py script on every rank, as ``mpiexec python path *argv`` would.

        Parameters
        ----------
        path : path_like
            The script. Only this process need be able to read it; its folder is on the
            ranks' `sys.path` where their nodes have it.
        argv : sequence
            Its arguments; each becomes a string.
        cwd : path_like, optional
            The folder to run in. Default: this process's own, where a node has it.
        env : mapping, optional
            Variables to add to the environment.
        timeout_s : float, optional
            As in `run`.

        Raises
        ------
        BadArgumentError
            If the script cannot be read.
        RoutineError
            If it raises on a rank or leaves with an exit code other than 0 (`facts["exit_code"]`).
        CallTimeoutError, GroupFailedError
            As in `run`.

        Notes
        -----
        `MPI.COMM_WORLD` is the gang's communicator while it runs, and MPI stays initialised
        whatever it calls. What the ranks print appears here as it is printed.
        """
        user_code.run_script(self.connection, path, argv, cwd, env, timeout_s)
