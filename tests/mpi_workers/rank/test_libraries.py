"""A library is replaced on all ranks or on none; errors of MPI in native code are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpi_workers.local import local_gang

RANKS = "tests.mpi_workers.rank.ranks_libraries:"
LIBRARY = """
from ali import Context, routine

@routine("version")
def version(ctx: Context) -> int:
    "The version of this file."
    return {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        (tmp_path / f"v{number}.py").write_text(LIBRARY.format(number))
    (tmp_path / "broken.py").write_text("raise OSError('the disk of this node is full')")
    return tmp_path


def test_a_library_that_fails_to_load_on_one_rank_replaces_none(folder: Path) -> None:
    found = local_gang.run(RANKS + "replaced", 3, str(folder))
    assert found["first"] == ["loaded"] * 3
    first, second, third = found["second"]
    assert first == third == "Interrupted"
    assert "the disk of this node is full" in second
    assert found["after second"] == found["settled"] == [1, 1, 1]
    assert found["third"] == ["loaded"] * 3
    assert found["after third"] == [3, 3, 3]


def test_a_load_that_is_cancelled_halfway_is_rolled_back(folder: Path) -> None:
    before, after = local_gang.run(RANKS + "cancelled", 3, str(folder))
    assert before == [2, 1, 1]  # the state that the next collective command repairs
    assert after == [1, 1, 1]


def test_an_error_of_mpi_is_raised_in_python_and_recorded_in_native_code() -> None:
    found = local_gang.run(RANKS + "native_error", 2)
    for name in ("gang", "duplicate", "world", "created", "python", "python, world"):
        assert "invalid rank" in found[name].lower(), name
    assert found["without an error"] is None
    assert found["total"] == 2
