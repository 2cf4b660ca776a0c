"""A gang as any process of the cluster sees it: commands through a link, data through doors."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.arrays.lifetime import MatrixLeases
from alchemist_ray.errors import (
    AlchemistError,
    GroupFailedError,
    LayoutError,
    MatrixNotFoundError,
    SessionError,
    ShapeError,
    StaleHandleError,
    TransferError,
    from_failure,
)
from alchemist_ray.functions.uploads import Staging
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.control_channel import (
    MANAGER_GONE,
    ControlChannel,
    OnProgress,
    ask_manager,
    open_control_channel,
)
from alchemist_ray.gang.progress import times_table, transfer_bar
from alchemist_ray.runtime.driver import NAMESPACE, group_name
from alchemist_ray.transfer import sources
from alchemist_ray.transfer.node_jobs import NODE_FAILED
from mpi_workers.data.rank_connections import (
    RankConnections,
    RankEndpoints,
    RankTimes,
    TransferTarget,
)
from mpi_workers.data.transfers import MatrixReader, MatrixWriter, Progress
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution, Grid, check_layout, copies, default_grid
from mpi_workers.matrix.memory import Pool
from mpi_workers.wire.frames import Body, WireError

if TYPE_CHECKING:
    from alchemist_ray.arrays.engine import Engine

T = TypeVar("T")
POOLED = 1 << 20  # 1 MiB: smaller results come from the ordinary allocator
NEWS_S = 2.0  # how long to wait for the news of a death after a transfer broke
AT_ONCE = ("list_matrices",)  # not answered in the order of commands
BASE_LAYOUT = "VC_STAR"  # what a layout with copies is sent as

# First touch of fresh memory costs ten times a copy into warm memory.
_results = Pool(
    min(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8), shared=False
)


def result_array(shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A C-ordered array for a result; large ones reuse the memory of results that are gone."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    if nbytes < POOLED:
        return np.empty(shape, dtype)
    try:
        return _results.take(nbytes).array().view(dtype).reshape(shape)
    except Failure as failure:
        raise from_failure(failure) from None


class GangConnection:
    """This process's view of one incarnation of a gang. Thread-safe.

    Parameters
    ----------
    gang_address : GangAddress
        How to reach it.
    manager : ActorHandle
        Its GroupManager.
    owner : bool
        Whether the gang ends when this process is gone.
    progress : bool, optional
        Show progress bars; None: on a terminal.
    output : bool
        Show what ranks print.
    """

    def __init__(
        self,
        gang_address: GangAddress,
        manager: ActorHandle,
        *,
        owner: bool,
        progress: bool | None = None,
        output: bool = True,
    ) -> None:
        self.gang_address = gang_address
        self.run_name = f"{gang_address.gang}.{gang_address.epoch}"
        self.manager = manager
        self.progress = progress
        self.output = output
        self._closed = False
        self.staging = Staging(self)
        self.leases = MatrixLeases(self._free)
        self._arrays: Engine | None = None
        self.grid: Grid = default_grid(len(gang_address.workers))
        self.rank_endpoints = RankEndpoints(
            gang_address.token, tuple(tuple(w["addresses"]) for w in gang_address.workers)
        )
        self.ranks = RankConnections(self.rank_endpoints)
        self._owner = owner
        self._link: ControlChannel = open_control_channel(gang_address, manager, owner=owner)

    def close(self) -> None:
        """Drop every connection of this process to the gang."""
        self._closed = True
        self.leases.close()
        self.ranks.close()
        self._link.close()
        with _lock:
            if _attached.get(self.gang_address.gang) is self:
                del _attached[self.gang_address.gang]

    def request(self, body: Body, on_progress: OnProgress | None = None) -> Body:
        """Run a command on the gang. Raises the tree's errors; Ctrl-C cancels it there."""
        if self._closed:
            raise SessionError(
                f"gang {self.run_name} was given up, with all "
                "that was loaded and made there: load_library(...) again in the session's new gang"
            )
        if not self.output:
            body = {**body, "output": False}
        try:
            self.leases.sweep(wait=body["op"] in AT_ONCE)
            return self._link.request(body, on_progress)
        except GroupFailedError:
            self.ranks.trim()  # a mapping would keep the memory of a rank that is gone
            raise

    def cancel(self) -> None:
        """Cancel the command that another thread waits for."""
        self._link.cancel()

    def _free(self, matrices: list[int], wait: bool) -> None:
        body: Body = {"op": "free", "matrices": matrices}
        if wait:
            self._link.request(body)
        else:
            self._link.tell(body)

    @property
    def arrays(self) -> Engine:
        """What its handles do as arrays."""
        from alchemist_ray.arrays.engine import Engine  # noqa: PLC0415  (it needs libraries)

        if self._arrays is None:
            self._arrays = Engine(self)
        return self._arrays

    def handle(self, about: Body) -> Handle:
        """The handle of a matrix that the gang has told of."""
        m, n = about["shape"]
        return Handle(
            id=about["matrix"],
            name=about["name"],
            shape=(m, n),
            dtype=np.dtype(about["dtype"]),
            layout=about["layout"],
            session=self.gang_address.session,
            gang=self.gang_address.gang,
            epoch=self.gang_address.epoch,
        )

    def check(self, handle: Handle) -> Handle:
        """The handle, if it is of this incarnation of this gang. Raises `MatrixError`."""
        if handle.session != self.gang_address.session:
            raise MatrixNotFoundError(
                f"{handle.name} lives in the gang of session {handle.session}, not in that of "
                f"session {self.gang_address.session}: fetch it there and send it here"
            )
        if (handle.gang, handle.epoch) != (self.gang_address.gang, self.gang_address.epoch):
            raise StaleHandleError(
                f"{handle.name} belonged to an earlier gang of session {handle.session}, whose "
                "memory is gone: send or compute it again"
            )
        return handle

    # --- sending ---

    def send(
        self,
        source: Any,
        *,
        layout: str,
        name: str | None,
        dtype: Any,
        print_times: bool,
    ) -> Handle:
        """Send an array or blocks in the object store; see `AlchemistSession.send_matrix`."""
        try:
            check_layout(layout)
        except ValueError as error:
            raise LayoutError(str(error)) from None
        plan = sources.source_for(source, dtype, self)
        sent_as = layout if copies(layout, self.grid) == 1 else BASE_LAYOUT
        created = self.request(
            {
                "op": "create",
                "shape": list(plan.shape),
                "dtype": plan.dtype.name,
                "layout": sent_as,
                "name": name,
                "source": plan.provenance(),
            }
        )
        target = TransferTarget(
            created["matrix"], Distribution(sent_as, plan.shape, self.grid), plan.dtype
        )
        nbytes = plan.shape[0] * plan.shape[1] * plan.dtype.itemsize
        try:
            with transfer_bar("send", nbytes, self.progress) as bar:
                times = self._watched(lambda: plan.send(self, target, self._wanted(bar, nbytes)))
            about = self.request({"op": "seal", "matrix": target.matrix})
            if sent_as != layout:
                about = self.request(
                    {"op": "redistribute", "source": target.matrix, "layout": layout, "name": name}
                )
                self.request({"op": "free", "matrices": [target.matrix]})
        except BaseException as error:
            self._forget(target.matrix, error)
            raise
        if print_times:
            print(times_table(times, sending=True))
        return self.handle(about)

    def write(
        self, target: TransferTarget, array: NDArray[Any], progress: Progress | None
    ) -> dict[int, RankTimes]:
        """Send a whole array from this process."""
        with MatrixWriter(self.ranks, target, progress) as writer:
            writer.write_block(array, (0, 0))
        return writer.times

    def _wanted(self, bar: Progress, nbytes: int) -> Progress | None:
        """No progress for what is over before a bar could show: panels cost a little."""
        return bar if self.progress or nbytes > 256 << 20 else None

    def _forget(self, matrix: int, error: BaseException) -> None:
        if isinstance(error, GroupFailedError):
            return
        with contextlib.suppress(AlchemistError):  # else the gang is gone, and it with it
            self.request({"op": "free", "matrices": [matrix]})

    # --- fetching ---

    def fetch(
        self,
        handle: Handle,
        rows: slice | int | None = None,
        cols: slice | int | None = None,
        *,
        print_times: bool = False,
    ) -> NDArray[Any]:
        """See `Handle.fetch`."""
        self.check(handle)
        row_range = _selected(rows, handle.shape[0], "rows")
        col_range = _selected(cols, handle.shape[1], "cols")
        row0, m, row_cut = _hull(row_range)
        col0, n, col_cut = _hull(col_range)
        out = result_array((m, n), handle.dtype)
        target = TransferTarget(
            handle.id, Distribution(handle.layout, handle.shape, self.grid), handle.dtype
        )

        def read() -> dict[int, RankTimes]:
            with (
                transfer_bar("fetch", out.nbytes, self.progress) as bar,
                MatrixReader(self.ranks, target, self._wanted(bar, out.nbytes)) as reader,
            ):
                if out.size:
                    reader.read_block(out, (row0, col0))
            return reader.times

        times = self._watched(read)
        if print_times:
            print(times_table(times, sending=False))
        return out if row_cut is None and col_cut is None else np.ascontiguousarray(
            out[row_cut or slice(None), col_cut or slice(None)]
        )  # fmt: skip

    def _watched(self, work: Callable[[], T]) -> T:
        """Run a transfer; if it breaks because the gang is dying, say that instead."""
        try:
            return work()
        except (Failure, WireError, OSError, TransferError) as error:
            if isinstance(error, Failure) and error.kind != "TransferError":
                raise from_failure(error) from None
            known = isinstance(error, TransferError) and error.facts.get("cause") == NODE_FAILED
            deadline = time.monotonic() + (0.0 if known else NEWS_S)
            while True:
                self.request({"op": "list_workers"})  # raises GroupFailedError once it is known
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.05)
            if isinstance(error, Failure):
                raise from_failure(error) from error.__cause__
            raise

    # --- other commands ---

    def to_layout(self, handle: Handle, layout: str) -> Handle:
        """See `Handle.to_layout`."""
        self.check(handle)
        try:
            check_layout(layout)
        except ValueError as error:
            raise LayoutError(str(error)) from None
        return self.handle(
            self.request({"op": "redistribute", "source": handle.id, "layout": layout})
        )

    def free(self, handle: Handle) -> None:
        """See `Handle.free`."""
        self.check(handle)
        self.request({"op": "free", "matrices": [handle.id]})


def _selected(wanted: slice | int | None, length: int, what: str) -> range:
    if wanted is None:
        return range(length)
    if isinstance(wanted, slice):
        return range(length)[wanted]
    try:
        index = range(length)[wanted]
    except IndexError:
        raise ShapeError(f"{what}={wanted} is outside a matrix with {length} {what}") from None
    except TypeError:
        raise ShapeError(f"{what} must be a slice or an integer, not {wanted!r}") from None
    return range(index, index + 1)


def _hull(selected: range) -> tuple[int, int, slice | None]:
    """First index and length of the stretch to move, and the cut of it that is wanted."""
    if not selected:
        return 0, 0, None
    low, high = min(selected[0], selected[-1]), max(selected[0], selected[-1])
    cut = None if selected.step == 1 else slice(None, None, selected.step)
    return low, high - low + 1, cut


# --- gangs known to this process --------------------------------------------------------

_lock = threading.Lock()
_attached: dict[str, GangConnection] = {}


def attach(client: GangConnection) -> None:
    """Let handles in this process find their gang."""
    with _lock:
        old = _attached.get(client.gang_address.gang)
        _attached[client.gang_address.gang] = client
    if old is not None:
        old.close()


def gang_of(handle: Handle) -> GangConnection:
    """The client of a handle's gang, connected at first use in this process.

    Raises
    ------
    StaleHandleError
        If that gang is gone.
    """
    with _lock:
        client = _attached.get(handle.gang)
    if client is not None and (
        client.gang_address.session == handle.session and client.gang_address.epoch >= handle.epoch
    ):
        return client
    try:
        if not ray.is_initialized():
            raise ValueError
        manager = ray.get_actor(group_name(handle.gang), namespace=NAMESPACE)
        gang_address: GangAddress = ask_manager(manager.gang_address.remote(), timeout_s=30)
        if gang_address.session != handle.session:
            raise SessionError("its manager has the gang of another session now")
    except (ValueError, SessionError, GroupFailedError) as error:
        if isinstance(error, GroupFailedError) and error.facts.get("cause") != MANAGER_GONE:
            raise  # it says what happened
        raise StaleHandleError(
            f"{handle.name} belonged to a gang of session {handle.session}, which has ended"
        ) from None
    client = GangConnection(gang_address, manager, owner=False)
    client.check(handle)
    attach(client)
    return client
