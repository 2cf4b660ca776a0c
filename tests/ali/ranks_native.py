"""Rank side of test_native.py."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ali import registry
from ali.interface import Context
from ali.registry import load
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.local.local_gang import begin, interrupt
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.layout import Runs, number_of
from mpi_workers.rank.gang_view import GangView
from mpi_workers.waits.interruption import waited_s
from tests.support.layouts import SOME_LAYOUTS
from tests.support.ranks_shared import failure_of


def descriptions(gang: GangView, path: str) -> list[Any]:
    """Whatever a library is told of a matrix agrees with the matrix."""
    library = load("every", path)
    wrong = []
    for layout in SOME_LAYOUTS:
        for shape in ((5, 3), (1, 1), (2, 9), (4,), (), (0, 3), (3, 0), (0,)):
            for dtype in DTYPES:
                A = gang.new(shape, dtype, layout)
                (told,) = library.call(gang, "about", {"A": A})
                m, n = len(A.rows), len(A.cols)
                if told[:6] + told[15:] != [
                    *A.shape, DTYPES.index(dtype) + 1, number_of(layout), *gang.grid,
                    len(shape),
                ]:  # fmt: skip
                    wrong.append([layout, shape, dtype, told])
                down, across = A.distribution.runs(gang.rank) or 2 * (Runs(0, 1, 1),)
                steps = [down.first, down.period, across.first, across.period]
                steps += [down.width, across.width]
                held = told[6] * told[7]
                if (
                    held != m * n
                    or told[8] != max(1, told[6] if held else 1)
                    or told[9:15] != steps
                ):
                    wrong.append([layout, shape, dtype, told, "local", gang.rank])
                if held and [told[6], told[7]] != [m, n]:
                    wrong.append([layout, shape, dtype, told, "local shape", gang.rank])
    return list(itertools.chain.from_iterable(gang.comm.allgather(wrong)))


def descriptors(gang: GangView, path: str) -> list[Any]:
    """Those that differ from Python's, and how many were compared."""
    library, wrong, done = load("every", path), [], 0
    for layout in ("MC_MR", "BLOCK", "BLOCK_CYCLIC:2", "BLOCK_CYCLIC:64"):
        for shape in ((5, 3), (1, 1), (2, 9), (7,), (0, 3), (40, 1)):
            A = gang.new(shape, "float64", layout)
            (told,) = library.call(gang, "descriptor", {"A": A})
            done += 1
            m, n = A.shape
            first = [1, 7, m, n, *A.distribution.block, 0, 0]
            if told != A.descriptor(7).tolist() or told[:8] != first:
                wrong.append([layout, shape, told, gang.rank])
    with pytest.raises(ValueError, match="no descriptor of a matrix in VC_STAR"):
        gang.new((2, 2), "float64", "VC_STAR").descriptor(7)
    return [[*itertools.chain(*gang.comm.allgather(wrong))], gang.comm.allreduce(done)]


def counts(gang: GangView, path: str, told: str) -> list[int]:
    """State lasts until the library is closed."""
    os.environ["EVERY_CLOSED"] = told
    library = load("every", path)
    found = [library.call(gang, "count", {})[0] for _ in range(3)]
    again = load("every", path)
    library.close()
    library.close()
    again.close()
    fresh = load("every", path)
    found.append(fresh.call(gang, "count", {})[0])
    return found


def mpi_errors(gang: GangView, path: str) -> list[Any]:
    """An ignored error fails the call; a handled one does not; then the gang still works."""
    library = load("mpi_errors", path)
    careless = failure_of(library.call, gang, "careless", {})
    (careful,) = library.call(gang, "careful", {})
    return [careless, careful, gang.comm.allreduce(1)]


def refusals(gang: GangView, path: str) -> list[str]:
    """Why a library is not loaded, the first and the second time."""
    return [failure_of(load, "x", path) for _ in range(2)]


def described(gang: GangView, name: str) -> dict[str, Any]:
    """The description of a library, or the reason why it did not load."""
    try:
        about = load(name).describe()
    except Failure as failure:
        return {"kind": failure.kind, "message": failure.message}
    names = [{"name": r["name"], "doc": r["doc"]} for r in about["routines"]]
    return {"name": about["name"], "doc": about["doc"], "routines": names}


def plugged_in(gang: GangView, path: str) -> dict[str, Any]:
    """A library whose entry point is a function that says where its shared object is."""
    calls = []
    plug = SimpleNamespace(value="plug:path", load=lambda: lambda: calls.append(1) or path)
    registry.entry_points = lambda group, name=None: [plug]
    about = described(gang, "plug")
    return {**about, "calls": len(calls)}


def cancelled_messages(gang: GangView, path: str, turns: int) -> list[float]:
    """Calls that fail on one rank while the others wait for its messages, then good ones."""
    library = load("halo", path)
    found = []
    for turn in range(turns):
        count = (1, 1000, 300_000)[turn % 3]  # below and above MPI's limit for eager messages
        begin(2 * turn + 1)
        try:
            library.call(gang, "exchange", {"count": count, "fails": turn % gang.size})
        except Failure:
            interrupt(2 * turn + 1)
        except Interrupted:
            pass
        else:
            raise AssertionError("the call did not fail")
        begin(2 * turn + 2)
        gang.renew()
        found += library.call(gang, "exchange", {"count": count, "fails": -1})
        gang.renew()  # all ranks have left the call before one fails in the next
    return found


def overwritten(gang: GangView, path: str, folder: str) -> Any:
    """The errors of a call and of a load after the file was written to; it is replaced then."""
    file = shutil.copy(path, Path(folder, "libx.so"))
    library = load("x", str(file))
    assert library.call(gang, "count", {}) == [1]
    shutil.copyfile(path, file)
    told = [failure_of(library.call, gang, "count", {}), failure_of(load, "x", str(file))]
    file.unlink()
    shutil.copy(path, file)
    assert load("x", str(file)).call(gang, "count", {}) == [1]
    return told


def waits(gang: GangView, path: str) -> Any:
    """By rank: whether half a second's wait for rank 0 was counted as time in MPI."""
    library = load("every", path)
    before = waited_s()
    if gang.rank == 0:
        gang.world.recv(source=1)  # it is about to wait
        time.sleep(0.5)
    else:
        gang.world.send(None, dest=0)
    begun = waited_s() if gang.rank == 0 else before
    library.call(gang, "fail", {"rank": gang.size, "how": "fail"})  # an allreduce, no failure
    return gang.comm.allgather(0.4 < waited_s() - begun < 5)


def device_pointer(gang: GangView, path: str) -> list[Any]:
    """What a library reads at a part's address on the device, and the error without one."""
    from tests.support.devices import counted  # noqa: PLC0415 - needs torch

    library = load("device", path)
    A = Context(gang, {}).new_replicated(np.arange(24.0).reshape(6, 4), "MC_MR")
    with counted() as found:
        told = [*library.call(gang, "sum", {"A": A}), found.copies]
    with pytest.raises(Failure) as refused:
        library.call(gang, "sum", {"A": A})
    return [*told, refused.value.message]
