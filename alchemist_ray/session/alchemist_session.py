"""`AlchemistSession`: a user's session."""

from __future__ import annotations

import contextlib
import html
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alchemist_ray.arguments import checked_mapping, checked_path, named_after
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.handle import Handle
from alchemist_ray.arrays.namespace import Namespace, namespace_of
from alchemist_ray.arrays.sparse import SparseHandle, as_csr, is_sparse, is_sparse_blocks
from alchemist_ray.arrays.times import TimeHandle
from alchemist_ray.attached import progress
from alchemist_ray.attached.info import CallInfo, GangInfo, WorkerInfo, gang_html
from alchemist_ray.attached.libraries import Library, call_limits, named
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.options import ConnectionOptions, GangOptions, documented
from alchemist_ray.attached.progress import matrix_text, narrated
from alchemist_ray.errors import BadArgumentError, LibraryNotFoundError, MatrixError
from alchemist_ray.functions import submitted, user_code
from alchemist_ray.session.channels import LiveView
from alchemist_ray.session.checkpoints import SessionCheckpoints
from alchemist_ray.session.files import SessionFiles
from alchemist_ray.session.owner import SharedGangs
from alchemist_ray.session.trace import SessionTraces
from alchemist_ray.transfer import fetching, sending

__all__ = ["AlchemistSession", "CallInfo", "GangInfo", "WorkerInfo"]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program has ended.

    Attributes
    ----------
    exit_codes : list of int
        One per rank.
    matrices : dict of str to Handle
        The matrices that it has created with ``alchemist_client.h``.
    """

    exit_codes: list[int]
    matrices: dict[str, Handle]


@documented(GangOptions, ConnectionOptions)
@named_after
class AlchemistSession(SharedGangs, SessionFiles, SessionCheckpoints, SessionTraces):
    """A session: a gang of MPI ranks, the matrices on it, and the libraries that it runs.

    Parameters
    ----------
    {options}
    Raises
    ------
    ValueError
        For an invalid option.
    ResourceError, LaunchError
        See `request_workers`.

    Notes
    -----
    Joins the Ray cluster of this process or machine. If no cluster runs, starts one that ends with
    this process.
    """

    # --- matrices ---

    def send_matrix(
        self,
        matrix: Any,
        *,
        layout: str = "VC_STAR",
        name: str | None = None,
        dtype: Any = None,
        missing: Any = "error",
        durable: bool = False,
        shape: tuple[int, int] | None = None,
        print_times: bool = False,
    ) -> Any:
        """Send a matrix to the gang.

        Parameters
        ----------
        matrix : array_like, shape (m, n) or (m,), or list of (ObjectRef, int, int)
            A NumPy array (any strides; may be read-only), or blocks
            in the Ray object store, each with the row and column of its first element, that
            together cover a matrix exactly once. Also arrays and frames of any package with
            ``__arrow_c_stream__``, ``__dlpack__``, ``__array__`` or ``__dataframe__`` (pandas,
            polars, DuckDB, pyarrow, torch, JAX), Dask collections, Ray Datasets, Spark's
            DataFrames, MLlib's distributed matrices, arrays of h5py and zarr, and
            sparse matrices of SciPy (layout does not apply to them). A list of
            ``(rows, columns, values)``, three arrays, or of ``(block, row0, col0)`` with sparse
            blocks of SciPy is a sparse matrix too. A handle of another gang: ranks get the
            elements from ranks (``docs/several-gangs.md``).
        layout : str
            Its distribution over the ranks: one of Elemental's 14, ``"BLOCK"`` or, for
            ScaLAPACK, ``"BLOCK_CYCLIC:64"`` (``docs/layouts.md``).
        name : str, optional
            Keeps the matrix until `Handle.free` or the end of the gang; `matrix` finds it.
        dtype : dtype, optional
            Convert to it while sending. Default: the matrix's own (``docs/transfer.md`` lists
            those that a matrix can have).
        missing : {"error", "nan"} or number
            What a null becomes, and a masked element: an error that names the column, NaN (a
            column of integers that may have nulls is one of floats then), or this number. NaN is
            a number already.
        durable : bool
            Keep a copy in the object store, with which the matrix is rebuilt after a failure. Only
            with ``max_failures``; arrays up to 1 MiB and blocks in the store are always kept.
        shape : (int, int), optional
            Of a sparse matrix in blocks, required if the blocks are ObjectRefs. Default: the
            smallest that has all of them.
        print_times : bool
            Print how long each step took, per rank.

        Returns
        -------
        Handle
            Of a sparse matrix a `SparseHandle` (`arrays.sparse`), which has products and solvers;
            of dates and durations a `TimeHandle` (`arrays.times`).

        Raises
        ------
        DtypeError, ShapeError, LayoutError, IncompleteMatrixError
            Before anything is sent.
        ResourceError
            If the ranks' nodes do not have the memory; before anything is sent.
        GroupFailedError, TransferError
            If a rank dies or cannot be reached; the matrix is freed.

        Notes
        -----
        On the same node the data is copied once, through shared memory; each other
        node has two streams. A layout with copies is sent once and copied by the ranks over MPI.
        """
        if shape is not None or is_sparse_blocks(matrix):
            matrix = as_csr(matrix, shape, dtype)
        sparse = is_sparse(matrix)
        what = f"{name or 'a sparse matrix'}" if sparse else f"{name or 'a matrix'} as {layout}"
        with narrated(self._options.verbose, f"Send of {what}"):
            return sending.send(
                self.connection, matrix, layout=layout, name=name, dtype=dtype, missing=missing,
                durable=durable, print_times=print_times,
            )  # fmt: skip

    def fetch_matrix(
        self,
        handle: Handle | SparseHandle | TimeHandle,
        *,
        rows: slice | int | None = None,
        cols: slice | int | None = None,
        print_times: bool = False,
    ) -> Any:
        """A matrix, or a part of it, as a NumPy array; see `Handle.fetch`.

        Of a sparse matrix all of it or some rows, as `scipy.sparse.csr_array`.
        """
        connection = self.connection
        if isinstance(handle, SparseHandle):
            if cols is not None:
                raise BadArgumentError(
                    "cols= is for dense matrices: A.fetch(rows)[:, cols], or A.T[cols].T on ranks"
                )
            return handle.fetch(rows)
        if isinstance(handle, TimeHandle):
            return handle.fetch(rows, cols, print_times=print_times)
        if not isinstance(handle, Handle):
            raise MatrixError(
                f"fetch_matrix takes a handle, as send_matrix returns it; got a "
                f"{type(handle).__name__}"
            )
        with narrated(self._options.verbose, f"Fetch of {matrix_text(handle)}"):
            return fetching.fetch(connection, handle, rows, cols, print_times=print_times)

    def list_matrices(self) -> list[Any]:
        """Handles of all matrices of the gang."""
        connection = self.connection
        told = connection.request({"op": "list_matrices"})["matrices"]
        return [connection.handle(about) for about in told]

    def _repr_html_(self) -> str:
        if not self.has_workers:
            return f"<pre>{html.escape(repr(self))}</pre>"
        return gang_html(self.connection)

    @property
    def xp(self) -> Namespace:
        """The array API standard's namespace for this gang: ``als.xp.ones((m, n))``, ...

        Raises
        ------
        SessionError
            If the session has no gang.
        """
        return namespace_of(self.connection)

    @property
    def eager(self) -> bool:
        """Whether operations on arrays are carried out one by one, at once. Default: False.

        Otherwise ``A * 2 + B`` is computed when its elements are needed, in one pass. A program
        sees a difference only in its times. Holds for all arrays of the gang in this process.
        """
        return self.connection.part(Engine).eager

    @eager.setter
    def eager(self, value: bool) -> None:
        engine = self.connection.part(Engine)
        engine.eager = bool(value)
        engine.recorder.flush()

    # --- libraries ---

    def load_library(
        self, name: str, path: str | os.PathLike[str] | None = None, *, reload: bool = False
    ) -> Library:
        """Load a library on every rank; one that is loaded from the same file is returned.

        A library keeps its state until another file of its name is loaded, `path` has changed,
        or the gang ends.

        Parameters
        ----------
        name : str
            A shipped library (``"linalg"``, ``"echo"``), an installed one, or any name with
            `path`.
        path : path_like, optional
            A Python file, or a shared object with the C ABI (``ali/include/alchemist.h``), that
            every node of the gang can read. For ``"scalapack"`` and ``"elemental"``: the path
            of the native library.
        reload : bool
            Load it again although it is loaded: the state is empty. A Python file is executed
            again; an installed module is not.

        Raises
        ------
        LibraryNotFoundError
        LibraryLoadError
            Also if another program uses a library of this name that would be replaced.
        """
        connection = self.connection
        if not isinstance(name, str) or not name:
            raise LibraryNotFoundError(f"a library's name must be a string, not {name!r}")
        given = None if path is None else str(checked_path("path", path))
        with narrated(
            connection.options.verbose, f"Library {name}" + f" from {given}" * (given is not None)
        ):
            described = connection.request(
                {"op": "load", "library": name, "path": given, "reload": bool(reload)}
            )
        library = Library(connection, described)
        self._held.libraries[name] = library
        return library

    def list_libraries(self) -> list[str]:
        """Names of the loaded libraries."""
        return [d["name"] for d in self.connection.request({"op": "list_libraries"})["libraries"]]

    def run_task(self, library: Library | str, routine: str, *args: Any, **kwargs: Any) -> Any:
        """Call a routine of a loaded library by name; ``lib.routine(...)`` is the same."""
        name = named(library)
        return self.library(name).routine(routine)(*args, **kwargs)

    def library(self, name: str) -> Library:
        """A library that this or another process has loaded on the gang.

        Raises
        ------
        LibraryNotFoundError
            If it is not loaded.
        """
        connection = self.connection
        loaded: dict[str, Library] = self._held.libraries
        if name not in loaded or connection.address.shared:  # others may have replaced it
            told = connection.request({"op": "list_libraries"})["libraries"]
            found = [described for described in told if described["name"] == name]
            if not found:
                raise LibraryNotFoundError(
                    f"library {name!r} is not loaded in this session: call load_library({name!r})"
                )
            loaded[name] = Library(connection, found[0])
        return loaded[name]

    def open_rank_channel(
        self, serve: Callable[[list[str], str], Any], timeout_s: float = 10.0
    ) -> Any:
        """Open channels to the ranks for a routine that serves; see `attached.rank_channel`.

        The routine occupies the gang until the channels are closed: no other command runs.

        Raises
        ------
        GroupFailedError
            If the gang has ended.
        """
        connection = self.connection
        return connection.transport.open_rank_channel(connection, serve, timeout_s)

    def watch(self, name: str) -> LiveView:
        """Look at a field of a running call, which it shows with ``ctx.show(name, A)``.

        ``for frame in als.watch("T"): ...`` gives each new frame as an array, the newest if several
        are new; ``als.watch("T").latest()`` the newest, or None. No rank waits for that. Not
        through a gateway.

        Raises
        ------
        SessionError
            If the session has no workers, or is reached through a gateway.
        """
        return LiveView(self.connection, name)

    # --- the user's code ---

    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout_s: float | None = None,
        stuck_timeout_s: float | None = None,
        pure: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run a Python function on every rank at once, as ``function(comm, *args, **kwargs)``.

        Parameters
        ----------
        function : callable
            Its first parameter is the gang's communicator (an `mpi4py.MPI.Intracomm` whose
            waits end when another rank fails). Functions and classes of your own modules are
            sent with it; other packages that it imports must be installed on the nodes.
        *args, **kwargs
            Its other arguments. A handle, also inside of lists and dicts, becomes this rank's
            part of the matrix (`ali.DistMatrix`), and a Ray ObjectRef its value. The rest is
            copied to every rank: send large arrays as matrices.
        timeout_s : float, optional
            Time limit of the call in seconds, including the wait for earlier calls.
        stuck_timeout_s : float, optional
            That of the session, for this call.
        pure : bool
            It changes none of the matrices that it gets, and has no other effects. Otherwise other
            programs cannot fetch these matrices during the call (on a gang with a name), and the
            call is not repeated if ranks are lost (with `max_failures`).

        Returns
        -------
        object
            The result of rank 0: NumPy arrays and plain values, also in lists, tuples and
            dicts. A DistMatrix, which every rank must return, becomes a `Handle`; its elements
            stay on the ranks.

        Raises
        ------
        BadArgumentError
            If it is not a function, or if it or an argument cannot be pickled; before anything
            is sent.
        MatrixNotFoundError, StaleHandleError
            For handles of matrices that are not, or no longer, on this gang.
        RoutineError
            If it raises on a rank, with that rank's traceback; the gang continues.
        CallTimeoutError
            If it exceeded `timeout_s` and was cancelled. Ctrl-C cancels it too.
        GroupFailedError
            If a rank dies.

        Notes
        -----
        ``ali.context()`` inside the function returns the `ali.Context` that routines of libraries
        get: new matrices, layouts, progress, cancellation. No state is kept between runs.
        """
        limits = call_limits(timeout_s, stuck_timeout_s)
        return user_code.run(self.connection, function, args, kwargs, limits, pure=pure)

    def submit(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout_s: float | None = None,
        stuck_timeout_s: float | None = None,
        pure: bool = False,
        label: str = "",
        keep_s: float = submitted.KEEP_S,
        **kwargs: Any,
    ) -> submitted.SubmittedCall:
        """Queue a call that outlives this program, on a gang that does; return its future.

        Another program attaches to the gang and finds the call with `futures`.

        Parameters
        ----------
        function : Routine or callable
            A routine of a library of this gang (``lib.truncated_svd``), or a function as for `run`.
        *args, **kwargs
            Its arguments. Matrices stay until the call is over. Of a function up to 32 MiB travel
            with the call; more is sent as a matrix, which waits for the call that runs.
        timeout_s : float, optional
            Time limit of the call in seconds, without its time in the queue.
        stuck_timeout_s : float, optional
            As in `run`.
        pure : bool
            As in `run`: a pure call that is lost with a rank runs again.
        label : str
            Shown in lists of calls.
        keep_s : float
            Seconds for which the result is kept after the end of the call, with its matrices.
            Default: seven days.

        Returns
        -------
        SubmittedCall
            A future of `concurrent.futures`: its `result` returns and raises what the call does.

        Raises
        ------
        BadArgumentError
            As in `run`, and for a routine of another gang.
        SessionError
            If the gang ends with its program: it needs ``lifetime="detached"``.
        ResourceError
            If the calls and results of the gang would exceed 256 MiB: `SubmittedCall.forget` frees
            some.

        Notes
        -----
        The gang runs submitted calls in their order, in turn with calls of other processes. The
        GroupManager has them in its memory (``docs/submitted-calls.md``).
        """
        limits = call_limits(timeout_s, stuck_timeout_s)
        call = submitted.Call(function, args, kwargs, limits, pure=pure, label=label)
        return submitted.submit(self.connection, call, keep_s)

    def futures(self) -> list[submitted.SubmittedCall]:
        """The submitted calls of this gang, of all programs, in their order; see `submit`.

        Also those that are over, until `SubmittedCall.forget` or their time to live.
        """
        return submitted.futures(self.connection)

    def output(self, to: bool | str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
        """A block in which the lines that ranks print go elsewhere, for calls of this thread::

            with als.output("logs"):
                als.run(simulate)  # prints to logs/rank0.txt, logs/rank1.txt, ...

        Parameters
        ----------
        to : bool or path_like
            A folder on this machine, to whose files the lines are appended; False: they are not
            shown; True: they are, as a session with ``output=True`` does.
        """
        if isinstance(to, bool):
            return contextlib.nullcontext() if to else progress.output_to(None)
        return progress.output_to(checked_path("to", to))

    def run_script(
        self,
        path: str | os.PathLike[str],
        argv: Sequence[Any] = (),
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        stuck_timeout_s: float | None = None,
    ) -> None:
        """Run an mpi4py script on every rank, like ``mpiexec python path *argv``.

        Parameters
        ----------
        path : path_like
            The script. Only this process must be able to read it. Its folder is on the ranks'
            `sys.path` if it exists on their nodes.
        argv : sequence
            Its arguments; each is converted to a string.
        cwd : path_like, optional
            Working directory. Default: that of this process, if it exists on the node.
        env : mapping, optional
            Environment variables to add.
        timeout_s, stuck_timeout_s : float, optional
            As in `run`.

        Raises
        ------
        BadArgumentError
            If the script cannot be read.
        RoutineError
            If it raises on a rank, or exits with a code other than 0 (``facts["exit_code"]``).
        CallTimeoutError, GroupFailedError
            As in `run`.

        Notes
        -----
        While it runs, `MPI.COMM_WORLD` is the gang's communicator, and MPI stays initialised
        even if it calls Finalize. Lines that the ranks print appear here at once.
        """
        limits = call_limits(timeout_s, stuck_timeout_s)
        where = checked_path("path", path)
        try:
            text = where.read_bytes()
        except OSError as error:
            raise BadArgumentError(f"run_script cannot read {where}: {error.strerror}") from error
        task = {
            "kind": "script",
            "name": where.name,
            "path": str(where),
            "code": [text],
            "argv": user_code.words_of(argv),
            **user_code.process_settings(cwd, env),
        }
        user_code.run_task(self.connection, task, [], limits)

    def run_program(
        self,
        argv: Sequence[Any],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | os.PathLike[str] | None = None,
        matrices: Mapping[str, Handle] | None = None,
        check: bool = True,
        timeout_s: float | None = None,
        stuck_timeout_s: float | None = None,
    ) -> ProgramResult:
        """Run an MPI executable with one process per rank, like ``mpiexec argv``.

        The processes run on the nodes and CPUs of the gang's ranks, and find each other through
        PMI: any program of MPICH or its relatives (Intel MPI, Cray MPICH, MVAPICH). A program of
        Open MPI is started by its own mpirun where that is installed, for gangs on one node.
        Lines that it prints appear here at once, with their rank.

        Parameters
        ----------
        argv : sequence
            The executable and its arguments; each is converted to a string. The executable must be
            on every node of the gang: a path (relative to `cwd`) or a name on the PATH there.
        cwd : path_like, optional
            Working directory. Default: that of this process, if it exists on the node.
        env : mapping, optional
            Environment variables to add.
        stdin : bytes, str or path_like, optional
            Standard input of rank 0: bytes, text, or a file of this process as a `Path`. The
            others read an empty one.
        matrices : mapping of str to Handle, optional
            Matrices that the program may attach to, read and change (``alchemist_client.h``).
        check : bool
            Whether an exit code other than 0 is an error.
        timeout_s, stuck_timeout_s : float, optional
            As in `run`.

        Returns
        -------
        ProgramResult

        Raises
        ------
        BadArgumentError
            If `argv` is not a list, or the program cannot be started on a node.
        RoutineError
            If it exits with a code other than 0 (``facts["exit_code"]``), is killed by a signal,
            calls MPI_Abort, or ends on some ranks while others wait in MPI_Init or MPI_Finalize.
        CallTimeoutError, CancelledError, GroupFailedError
            As in `run`. The processes and their children have ended then.

        Notes
        -----
        Costs about 10 ms, and the start of the program.
        """
        limits = call_limits(timeout_s, stuck_timeout_s)
        words = user_code.words_of(argv)
        if not words:
            raise BadArgumentError("argv=[]: the first element names the program")
        uses: dict[str, int] = {}
        for name, handle in checked_mapping("matrices", matrices, "names and handles").items():
            if not isinstance(handle, MatrixRef):
                raise BadArgumentError(
                    f"matrices[{name!r}] is a {type(handle).__name__}: it must be a handle; "
                    "als.send_matrix makes one of an array"
                )
            uses[str(name)] = self.connection.argument(handle)
        read = user_code.standard_input(stdin)
        task = {
            "kind": "program",
            "name": os.path.basename(words[0]),
            "argv": words,
            "check": check,
            "matrices": uses,
            "given": read and [read],
            **user_code.process_settings(cwd, env),
        }
        used = sorted(set(uses.values()))
        ended = user_code.run_task(self.connection, task, used, limits)
        return ProgramResult(ended["exit_codes"], ended["matrices"])
