"""Blocks return to the pool when the last array on them is deleted; allocations are admitted."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mpi_workers.failures import Failure
from mpi_workers.matrix import available_memory, memory
from mpi_workers.matrix.available_memory import NodeAllocations, available_bytes
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.memory import PAGE, Pool
from mpi_workers.matrix.sizes import readable
from mpi_workers.matrix.storage import Storage
from tests.support.traces import wait_until

MIB = 1 << 20


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(64 * MIB, shared=request.param)


def test_a_block_is_writable_memory_of_its_size(pool: Pool) -> None:
    block = pool.take(1000)
    array = block.array()
    array[...] = 7
    assert array.nbytes == 1000
    assert (block.array() == 7).all()


def test_a_matrix_is_fortran_ordered_and_not_a_copy(pool: Pool) -> None:
    block = pool.take(3 * 5 * 8)
    matrix = block.matrix((3, 5), np.dtype("float64"))
    matrix[...] = np.arange(15.0).reshape(3, 5)
    assert matrix.flags.f_contiguous
    assert block.array().view("float64").tolist() == matrix.T.ravel().tolist()


def test_an_empty_block_is_possible(pool: Pool) -> None:
    assert pool.take(0).matrix((0, 0), np.dtype("complex128")).shape == (0, 0)


def test_the_segment_of_a_forgotten_block_is_lent_again(pool: Pool) -> None:
    block = pool.take(MIB)
    segment = block.segment.id
    del block
    gc.collect()
    assert pool.idle_bytes() == MIB
    assert pool.take(MIB).segment.id == segment


def test_an_array_keeps_its_block_lent(pool: Pool) -> None:
    block = pool.take(MIB)
    segment = block.segment.id
    view = block.matrix((1024, 128), np.dtype("float64"))[::2, 3:]
    del block
    gc.collect()
    assert pool.idle_bytes() == 0
    assert pool.take(MIB).segment.id != segment
    view[...] = 1.0
    del view
    gc.collect()
    assert pool.idle_bytes() >= MIB


def test_a_segment_much_too_big_is_not_lent(pool: Pool) -> None:
    segment = pool.take(4 * MIB).segment.id
    gc.collect()
    assert pool.take(2 * MIB).segment.id != segment
    assert pool.take(4 * MIB - 4 * MIB // 8).segment.id == segment


def test_small_blocks_share_any_small_segment(pool: Pool) -> None:
    segment = pool.take(memory.ANY_FIT_BYTES).segment.id
    gc.collect()
    assert pool.take(10).segment.id == segment


def test_the_best_fit_is_taken(pool: Pool) -> None:
    blocks = [pool.take(n * MIB) for n in (12, 10, 11)]
    ids = [block.segment.id for block in blocks]
    del blocks
    gc.collect()
    assert pool.take(10 * MIB).segment.id == ids[1]


def test_a_tainted_segment_is_never_lent_again(pool: Pool) -> None:
    block = pool.take(MIB)
    segment = block.segment.id
    block.segment.tainted = True
    del block
    gc.collect()
    assert pool.idle_bytes() == 0
    assert pool.take(MIB).segment.id != segment


def test_the_pool_keeps_at_most_its_limit() -> None:
    pool = Pool(3 * MIB, shared=False)
    blocks = [pool.take(MIB) for _ in range(5)]
    ids = [block.segment.id for block in blocks]
    while blocks:
        del blocks[0]  # the first has been idle longest
    gc.collect()
    assert pool.idle_bytes() == 3 * MIB
    kept = [pool.take(MIB) for _ in range(3)]
    assert sorted(block.segment.id for block in kept) == ids[2:]


def test_trim_returns_memory(pool: Pool) -> None:
    lent, returned = pool.take(MIB), pool.take(2 * MIB)
    del returned
    gc.collect()
    assert pool.trim() == 2 * MIB
    assert pool.idle_bytes() == 0
    assert lent.array().size == MIB


def test_idle_memory_is_returned_after_some_time(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "IDLE_S", 0.2)
    for _ in range(2):  # the thread that returns memory ends, and is started again
        lent, returned = pool.take(2 * MIB), pool.take(2 * MIB)
        del returned
        gc.collect()
        assert pool.idle_bytes() == 2 * MIB
        assert wait_until(lambda: not pool.idle_bytes(), 5.0) is not None
        del lent
        gc.collect()


def test_a_returned_segment_takes_no_memory_although_another_process_maps_it() -> None:
    pool = Pool(MIB, shared=True)
    block = pool.take(MIB // 2)
    block.array()[...] = 7
    fd = os.dup(block.segment.fd)
    try:
        with mmap.mmap(fd, MIB // 2) as other:
            assert other[:2] == b"\7\7"
            assert os.fstat(fd).st_blocks * 512 == MIB // 2
            del block
            gc.collect()
            pool.trim()
            assert os.fstat(fd).st_blocks == 0
            assert other[:2] == b"\0\0"
    finally:
        os.close(fd)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_can_use_the_pool_of_a_busy_parent() -> None:
    pool = Pool(MIB, shared=False)
    over = threading.Event()

    def use() -> None:
        while not over.is_set():
            pool.take(PAGE)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(50):
            pid = os.fork()
            if pid == 0:
                signal.alarm(5)
                pool.take(PAGE)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        over.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_releases_nothing_of_its_parents() -> None:
    pool = Pool(MIB, shared=True)
    idle, block = pool.take(PAGE), pool.take(PAGE)
    block.array()[:] = 5
    del idle  # back in the pool
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        del block
        gc.collect()
        for _ in range(4):
            pool.take(PAGE).array()[:] = 9
        pool.trim()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (block.array() == 5).all()
    assert (pool.take(PAGE).array() != 9).all()


def test_every_segment_of_a_dropped_block_closes_its_descriptor() -> None:
    pool = Pool(0, shared=True)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        pool.take(PAGE)
    gc.collect()
    assert pool.idle_bytes() == 0
    assert len(os.listdir("/proc/self/fd")) <= before


def test_another_mapping_sees_what_is_written_and_cannot_shrink_it() -> None:
    pool = Pool(MIB, shared=True)
    block = pool.take(PAGE)
    with mmap.mmap(block.segment.fd, PAGE) as other:
        block.array()[:3] = (1, 2, 3)
        assert other[:3] == b"\1\2\3"
        other[0] = 9
    assert block.array()[0] == 9
    with pytest.raises(PermissionError):
        os.ftruncate(block.segment.fd, 0)


def test_private_memory_has_no_descriptor() -> None:
    assert Pool(MIB, shared=False).take(PAGE).segment.fd == -1


def test_a_shared_segment_leaves_no_name() -> None:
    before = set(os.listdir("/dev/shm"))
    block = Pool(MIB, shared=True).take(MIB)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "alchemist" in name]
    assert block.nbytes == MIB


def test_a_block_larger_than_free_memory_is_refused_before_allocation(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A size that is really too large would trigger the OOM killer if the check failed.
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * MIB)
    words = r"not enough memory on this node for a block of 3\.1 MB: Cannot allocate"
    with pytest.raises(Failure, match=words) as error:
        pool.take(3 * MIB)
    assert error.value.kind == "ResourceError"
    pool.take(PAGE).array()[...] = 1  # and the pool stays usable


@pytest.fixture
def storage() -> Storage:
    return Storage(1, Pool(64 * MIB, shared=False))


def test_storage_allocates_the_rank_s_own_part(storage: Storage) -> None:
    matrix = storage.new(Distribution("VC_STAR", (5, 3), (1, 2)), np.dtype("int32"))
    assert matrix.local.shape == (2, 3)
    assert list(matrix.rows) == [1, 3]
    assert matrix.nbytes == 60
    assert matrix.leading_dimension == 2


def test_storage_refuses_a_matrix_larger_than_free_memory(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpi_workers.matrix.storage.available_bytes", lambda: MIB)
    with pytest.raises(Failure, match=r"rank 1 needs .* STAR_STAR.*free handles") as error:
        storage.new(Distribution("STAR_STAR", (1024, 512), (1, 2)), np.dtype("float64"))
    assert error.value.kind == "ResourceError"


def test_storage_returns_warm_memory_when_memory_is_short(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.pool.take(8 * MIB)
    gc.collect()
    monkeypatch.setattr(
        "mpi_workers.matrix.storage.available_bytes", lambda: 9 * MIB - storage.pool.idle_bytes()
    )
    kept = storage.new(Distribution("STAR_STAR", (1024, 512), (1, 2)), np.dtype("float64"))
    assert storage.pool.idle_bytes() == 0
    assert kept.local.nbytes == 4 * MIB


class Node:
    """Memory that four ranks share, each on a thread."""

    def __init__(self, folder: Path, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = free
        self._lock = threading.Lock()
        self._ranks = [NodeAllocations(folder, rank, 4) for rank in range(4)]
        monkeypatch.setattr(available_memory, "available_bytes", lambda: self.free)

    def allocate(self, rank: int, nbytes: int) -> int | None:
        """None if it was admitted, else the bytes that were available."""
        with self._ranks[rank].admit(nbytes, lambda: False) as spare:
            if spare is None:
                time.sleep(0.02)  # the others decide before the pages are there
                with self._lock:
                    self.free -= nbytes
            return spare

    def allocate_all(self, nbytes: int) -> list[int | None]:
        with ThreadPoolExecutor(4) as executor:
            return list(executor.map(lambda rank: self.allocate(rank, nbytes), range(4)))


@pytest.mark.parametrize(
    ("nbytes", "spare"), [(7 * MIB, [3 * MIB, 3 * MIB, 3 * MIB, None]), (10 * MIB // 4, [None] * 4)]
)
def test_ranks_of_a_node_take_what_there_is_and_wait_for_allocations_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, spare: list[int | None]
) -> None:
    node = Node(tmp_path, 10 * MIB, monkeypatch)
    assert sorted(node.allocate_all(nbytes), key=str) == spare
    assert node.free == 10 * MIB - nbytes * spare.count(None)


def test_a_rank_returns_its_idle_memory_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, 2 * MIB, monkeypatch)

    def make_room() -> bool:
        found, node.free = node.free < 5 * MIB, 5 * MIB
        return found

    with NodeAllocations(tmp_path, 0, 4).admit(4 * MIB, make_room) as spare:
        assert spare is None
    with NodeAllocations(tmp_path, 0, 4).admit(6 * MIB, make_room) as spare:
        assert spare == 5 * MIB


def test_a_shortage_makes_other_ranks_return_idle_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Pool(64 * MIB, shared=True, shortages=NodeAllocations(tmp_path, 1, 2).shortages)
    other.take(8 * MIB)
    gc.collect()
    monkeypatch.setattr(available_memory, "available_bytes", lambda: 12 * MIB - other.idle_bytes())
    time.sleep(2 * memory.SHORTAGE_POLL_S)  # its thread watches by now
    with NodeAllocations(tmp_path, 0, 2).admit(9 * MIB, lambda: False) as spare:
        assert spare is None
    assert other.idle_bytes() == 0


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda s: s.sealed(1), "IncompleteMatrixError"),
        (lambda s: s.seal(1), "IncompleteMatrixError"),
        (lambda s: s.sealed(2), "MatrixNotFoundError"),
        (lambda s: s.entry("1"), "MatrixNotFoundError"),
    ],
)
def test_an_incomplete_matrix_is_not_usable(
    storage: Storage, ask: Callable[[Storage], object], kind: str
) -> None:
    storage.put(
        1, storage.new(Distribution("VC_STAR", (5, 3), (1, 2)), np.dtype("int32")), sealed=False
    )
    storage.count(storage.entry(1), 5, 1)
    with pytest.raises(Failure) as error:
        ask(storage)
    assert error.value.kind == kind


def test_a_matrix_is_complete_when_every_element_has_arrived(storage: Storage) -> None:
    matrix = storage.new(Distribution("VC_STAR", (5, 3), (1, 2)), np.dtype("int32"))
    storage.put(1, matrix, sealed=False)
    storage.count(storage.entry(1), 5, 1)
    storage.count(storage.entry(1), 5, 1)  # repeated
    storage.count(storage.entry(1), 1, 2)
    storage.seal(1)
    assert storage.sealed(1) is matrix
    storage.free(1)
    storage.free(1)
    with pytest.raises(Failure, match="holds no matrix 1: it was freed"):
        storage.sealed(1)


def test_available_bytes_are_at_most_the_machine_s_memory() -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_bytes() <= pages


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e9, "2.0 GB"), (5e16, "50000.0 TB")],
)
def test_readable_uses_decimal_units(nbytes: float, text: str) -> None:
    assert readable(nbytes) == text
