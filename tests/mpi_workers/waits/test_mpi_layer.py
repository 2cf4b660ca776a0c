"""Waits in MPI, of any code, end with their call."""

from __future__ import annotations

import ctypes.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_workers.local import local_gang
from mpi_workers.waits import mpi_layer
from tests.support import launches
from tests.support.build import needs_compiler, shared_object

RANKS = "tests.mpi_workers.waits.ranks_mpi_layer:"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("crowded", [False, True])
def test_every_method_gives_what_mpi_alone_gives(ranks: int, crowded: bool) -> None:
    found = local_gang.run(RANKS + "agreement", ranks, crowded, timeout=30)
    assert len(found) >= 30
    assert [name for name, same in found.items() if not same] == []


@pytest.mark.parametrize(("ranks", "crowded"), [(2, False), (3, False), (4, False), (3, True)])
def test_random_collectives_give_what_mpi_alone_gives(ranks: int, crowded: bool) -> None:
    assert local_gang.run(RANKS + "in_any_order", ranks, 500, crowded, 7 + ranks) == []


def test_a_late_rank_reads_no_other_communicator_in_place_of_one_that_was_freed() -> None:
    assert local_gang.run(RANKS + "freed", 3) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_interrupt_ends_every_wait_and_what_follows_is_right(ranks: int, tmp_path: Path) -> None:
    found = local_gang.run(RANKS + "ends", ranks, str(tmp_path / "word"), timeout=30)
    assert len(found) >= 30
    assert [name for name, (freed, _, _) in found.items() if not freed] == []
    limit_s = 3.0  # 0.2 are measured, the GRACE_S of the layer
    late = [(name, late) for name, (_, late, _) in found.items() if not 0 < late < limit_s]
    assert late == []
    assert [name for name, (_, _, right) in found.items() if not right] == []


def test_a_collective_that_the_others_complete_costs_no_process(tmp_path: Path) -> None:
    """An error on which all ranks have agreed ends the call on one before another has a core."""
    told = local_gang.run(RANKS + "nearly_complete", 3, str(tmp_path / "word"), timeout=30)
    assert told == [[[0.0, 1.0, 2.0], ""]] * 3


def test_nothing_is_written_into_memory_of_waits_that_were_left(tmp_path: Path) -> None:
    silent, told = local_gang.run(RANKS + "canaries", 4, str(tmp_path / "word"), timeout=60)
    assert silent == []
    small = [name for name in told if name.endswith(" of 5") and name != "Allgatherv of 5"]
    assert small == []  # ranks go on after them
    assert "Allreduce of 100000" in told


@pytest.mark.parametrize("language", ["Python", "C"])
def test_200_calls_that_were_ended_use_up_no_more_than_their_communicators(
    tmp_path: Path, language: str
) -> None:
    library = None
    if language == "C":
        if shutil.which("cc") is None:
            pytest.skip("needs a C compiler")
        source = Path(__file__).with_name("waiting.c")
        library = str(shared_object(source, tmp_path / "libwaiting.so"))
    arguments = (str(tmp_path / "word"), library)
    spare, unsafe = local_gang.run(RANKS + "leaks", 2, *arguments, timeout=200)
    assert spare > 1500
    assert ("native code" in unsafe) == (language == "C")


@pytest.mark.parametrize("crowded", [False, True])
def test_a_rank_that_has_no_core_when_a_call_is_ended_loses_no_other(
    tmp_path: Path, crowded: bool
) -> None:
    """All ranks leave a collective, or all go on into it."""
    arguments = (str(tmp_path / "word"), crowded)
    assert local_gang.run(RANKS + "without_a_core", 4, *arguments, timeout=60) == 30


def test_only_calls_that_have_spoken_use_up_a_communicator(tmp_path: Path) -> None:
    same, other, count, said, total, refused = local_gang.run(
        RANKS + "communicators", 2, str(tmp_path / "word")
    )
    assert same
    assert other
    assert 1500 < count < 2100
    assert "ResourceError" in said
    assert "open another session" in said
    assert total == 2  # the last one still works
    assert "the gang's own communicator" in refused


def test_all_ranks_have_the_layer_or_none() -> None:
    found = local_gang.run(RANKS + "starts", 3)
    assert found == [[[on, on]] * 3 for on in (True, False)]


def test_a_layer_of_other_sources_is_refused(tmp_path: Path) -> None:
    waits = Path(mpi_layer.__file__).parent
    package = tmp_path / "mpi_workers"
    shutil.copytree(waits.parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = package / "waits" / "mpi_waits.c"
    source.write_text(source.read_text() + "\n")
    program = "from mpi_workers.waits import mpi_layer; mpi_layer.loaded()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "rebuild it, by `python -m mpi_workers.build_native`" in done.stderr


def test_an_interrupt_ends_the_calls_up_to_its_number_only(tmp_path: Path) -> None:
    assert launches.run(RANKS + "not_yet", 2, str(tmp_path / "word")) == [False, 2, True]


IN_C = (
    *("Allreduce", "Allreduce_c", "Bcast", "Barrier", "Recv", "Probe", "Alltoallv", "Win_fence"),
    *("Wait", "Waitany", "Waitall"),
)
POLLS = ("Iprobe", "Improbe", "Get_status", "Test", "Testall", "Testany", "Testsome")
BLACS = "scalapack-mpich"  # Debian's; its errors of MPI are ignored, as by careless code


@needs_compiler
@pytest.mark.parametrize("ranks", [2, 4])
def test_native_code_that_waits_leaves_with_the_call(ranks: int, tmp_path: Path) -> None:
    has_blacs = ctypes.util.find_library(BLACS)
    flags = ["-DWITH_BLACS", f"-l:{has_blacs}"] if has_blacs else []
    source = Path(__file__).with_name("waiting.c")
    path = shared_object(source, tmp_path / "libwaiting.so", *flags)
    calls = [*IN_C, "dgsum2d"] if has_blacs else IN_C
    cases = [(how, (i + ranks // 2) % 2 == 0) for i, how in enumerate(calls)]
    _end_with_their_call(path, tmp_path / "word", ranks, cases)


@needs_compiler
def test_native_code_that_polls_leaves_with_the_call(tmp_path: Path) -> None:
    source = Path(__file__).with_name("waiting.c")
    path = shared_object(source, tmp_path / "libwaiting.so")
    cases = [(f"poll {call}", False) for call in POLLS]
    _end_with_their_call(path, tmp_path / "word", 2, cases)


def _end_with_their_call(path: Path, word: Path, ranks: int, cases: list[tuple[str, bool]]) -> None:
    """Rank 1 fails while the others wait for it in a library."""
    told = local_gang.run(RANKS + "native", ranks, str(path), str(word), cases, timeout=30)
    for (how, careless), (said, seconds, total) in zip(cases, told, strict=True):
        assert "rank 1 does not take part" in said[1]
        others = [words for rank, words in enumerate(said) if rank != 1]
        assert all(" in waiting.wait" in words for words in others), (how, careless, said)
        assert seconds < 1, (how, careless)
        assert total == ranks
