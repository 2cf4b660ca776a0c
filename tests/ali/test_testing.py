"""The conformance suite finds fault where there is some, in words that an author can use."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ali.testing import Case, LibraryTests
from mpi_workers.local import local_gang

FAULTY = '''"""A library with faults."""
import time
import numpy as np
from mpi4py import MPI
from ali import Context, DistMatrix, routine

@routine("B")
def fine(ctx: Context, A: DistMatrix) -> DistMatrix:
    """B = A."""
    B = ctx.empty_like(A)
    B.local[...] = A.local
    return B

@routine("n")
def only_rows(ctx: Context, A: DistMatrix) -> int:
    """The rows on rank 0: depends on the layout."""
    return A.local.shape[0]

@routine("A")
def scribble(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Writes into its argument."""
    A.local[...] += 1
    return A

@routine(writes=("A",))
def twice(ctx: Context, A: DistMatrix) -> None:
    """Doubles its argument, as declared."""
    A.local[...] *= 2

@routine(writes=("A",))
def numbered(ctx: Context, A: DistMatrix, checking: str) -> None:
    """The numbers of its rows, which it knows of one layout."""
    if A.layout != "VC_STAR" and checking != "no" and not (checking == "rank 0" and ctx.rank):
        raise ValueError("only VC_STAR")
    A.local[...] = ctx.rank + ctx.size * np.arange(len(A.local))[:, None]

@routine("B")
def uneven(ctx: Context) -> DistMatrix:
    """Other shapes on other ranks."""
    return ctx.zeros((2 + ctx.rank, 2), "float64")

@routine("x")
def sometimes(ctx: Context) -> float:
    """Fails on the last rank, while the others wait."""
    if ctx.rank == ctx.size - 1:
        raise ValueError("no luck")
    ctx.comm.Barrier()
    return 0.0

@routine("n")
def picky(ctx: Context, A: DistMatrix) -> int:
    """Takes no bool, as rank 1 alone notices."""
    if A.dtype == bool and ctx.rank == 1:
        raise TypeError("a mask")
    return A.shape[0]

@routine()
def silent(ctx: Context) -> None:
    """Does not fail."""

@routine("calls")
def count(ctx: Context) -> int:
    """How often it was called."""
    ctx.state["calls"] = ctx.state.get("calls", 0) + 1
    return ctx.state["calls"]

@routine()
def undocumented(ctx: Context) -> None: ...
'''
LEAVING = '''"""A library that leaves an exchange when it is cancelled."""
import time
import numpy as np
from ali import Context, conformance, routine
conformance.CANCEL_S = 0.6  # the first rank is in the exchange by then

@routine("n")
def exchange(ctx: Context) -> int:
    """The last rank is late."""
    if ctx.rank == ctx.size - 1:
        time.sleep(1.2)
    x, y = np.ones(1 << 16), np.empty(1 << 16)
    ctx.comm.Alltoall(x, y)
    return int(y.sum())
'''
A = np.arange(6.0).reshape(3, 2)


def numbered(checking: str) -> Case:
    numbers = np.arange(3.0)[:, None] * [1, 1]
    changed = {"A": numbers}
    return Case("numbered", {"A": A, "checking": checking}, changed=changed, layouts=["VC_STAR"])


@functools.cache
def found(folder: str, *cases: str) -> dict[str, Any]:
    path = Path(folder) / "faulty.py"
    path.write_text(FAULTY)

    class Faulty(LibraryTests):
        library = "faulty"
        cases = (
            Case("fine", {"A": A}, [A]),
            Case("only_rows", {"A": A}, [3]),
            Case("scribble", {"A": A}),
            Case("twice", {"A": A}, changed={"A": 3 * A}),
            Case("twice", {"A": A + 1}, changed={"A": 2 * A + 2}),
            Case("twice", {"A": A}, changed={"B": 3 * A}),
            Case("picky", {"A": A}, [3]),
            *(numbered(checking) for checking in ("all", "rank 0", "no")),
            Case("uneven"),
            Case("sometimes"),
            Case("silent", raises="a reason"),
            Case("count", {}, [1], fresh=True),
            Case("nosuch"),
        )

    Faulty.path = path
    return Faulty()._launch(2)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found(str(tmp_path_factory.mktemp("faulty")))


def test_what_is_not_declared_well(faults: dict[str, Any]) -> None:
    assert sorted(faults["signatures"]) == [
        "there is no routine nosuch",
        "undocumented has no case",
        "undocumented has no documentation",
    ]


def test_wrong_results_name_routine_and_layout(faults: dict[str, Any]) -> None:
    results = faults["results"]
    assert not [words for words in results if words.startswith(("fine", "count", "silent"))]
    assert any(w.startswith("only_rows, matrices in VC_STAR: n is\n2\nand not") for w in results)
    assert not any(w.startswith("only_rows, matrices in STAR_STAR") for w in results)
    doubled, other = [w for w in results if w.startswith("twice, matrices in MC_MR:")]
    assert "it has changed A to" in doubled
    assert "expects changes of B" in other
    assert any("scribble, matrices in MC_MR: it has changed its argument A" in w for w in results)
    assert any("uneven, matrices in MC_MR: B differs between ranks" in w for w in results)
    assert any(
        "sometimes" in w and "it failed on rank 1: ValueError: no luck" in w for w in results
    )


def test_layouts_that_are_not_taken_are_refused_by_all(faults: dict[str, Any]) -> None:
    words = [one for one in faults["results"] if one.startswith("numbered, matrices in STAR_VC:")]
    refused, wrong = words  # nothing of the case that all ranks refuse
    assert "it failed on rank 0: ValueError: only VC_STAR" in refused
    assert "it has changed A to" in wrong
    assert not any("numbered, matrices in VC_STAR:" in one for one in faults["results"])


def test_a_failure_that_does_not_come(faults: dict[str, Any]) -> None:
    (words,) = faults["failures"]
    assert words.startswith("silent: expected 'a reason', not ['no error', 'no error']")


def test_unusual_matrices_that_only_some_ranks_refuse(faults: dict[str, Any]) -> None:
    (words,) = faults["unusual"]
    assert words.startswith("picky of bool fails on some ranks only: ['', 'TypeError: a mask']")


def test_a_sound_routine_is_not_blamed_for_others(faults: dict[str, Any]) -> None:
    assert faults["cancelled"] == faults["one_rank"] == faults["reloads"] == []
    assert not faults["empty"] or faults["empty"] is True


def test_checks_go_on_in_other_processes_when_mpi_may_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the calls of a gang do, whose ranks are started again."""
    launches: list[Any] = []
    run = local_gang.run

    def counted(*arguments: Any, **options: Any) -> Any:
        launches.append(arguments[-2:])
        return run(*arguments, **options)

    monkeypatch.setattr(local_gang, "run", counted)

    class Leaving(LibraryTests):
        library = "leaving"
        path = tmp_path / "leaving.py"
        cases = (Case("exchange", {}, [1 << 16]),)

    Leaving.path.write_text(LEAVING)
    found = Leaving()._launch(2)
    assert found.pop("empty") is False
    assert not any(found.values()), found
    # After a failure on the last rank, and a call cancelled midway; case 0 was right.
    assert launches == [(0, ()), (1, [0]), (3, [0])]


class TestHanging(LibraryTests):
    """A wait that cannot be left is told, with what to do."""

    library = "hanging"
    cases = (Case("wait"),)
    patience_s = 2.0

    @pytest.fixture(autouse=True)
    def _write(self, tmp_path: Path) -> None:
        type(self).path = tmp_path / "hanging.py"
        Path(type(self).path).write_text(
            '"""Hangs."""\nimport time\nfrom ali import Context, routine\n'
            '@routine()\ndef wait(ctx: Context) -> None:\n    """Waits."""\n'
            "    try:\n        ctx.comm.Barrier()\n"
            "    except Exception:\n        time.sleep(100)\n"
        )

    def test_it(self) -> None:
        with pytest.raises(
            AssertionError, match=r"use alchemist_check.*interruptible = False"
        ) as e:
            self._launch(2)
        assert "wait on the other ranks, when one had failed before it, did not return" in str(
            e.value
        )


# The suite itself would fail on it, as it should.
for _name in [name for name in vars(LibraryTests) if name.startswith("test_")]:
    setattr(TestHanging, _name, None)
