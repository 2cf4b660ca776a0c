"""Programs that simulators ask step by step, and scripts, of which nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from ali import scaffold
from mpi_workers.local import local_gang
from tests.support.build import needs_compiler, run

RANKS = "tests.ali.ranks_programs:"


def test_the_answer_to_an_interrupted_question_is_not_that_to_the_next() -> None:
    assert local_gang.run(RANKS + "late_answer", 1) == ["second", "third"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_program_may_end_with_its_last_answer(ranks: int) -> None:
    assert local_gang.run(RANKS + "last_answer", ranks) == ["first", "last", *[False] * ranks]


@needs_compiler
@pytest.mark.parametrize("more", [[], ["rank 0 later"]])
def test_a_program_may_finalize_with_its_last_answer(tmp_path: Path, more: list[str]) -> None:
    source, target = Path(__file__).parent / "native" / "last_answer.c", tmp_path / "last_answer"
    run(scaffold.mpi_compiler("mpicc"), "-o", target, source, cwd=tmp_path)
    assert local_gang.run(RANKS + "last_answer", 2, str(target), *more)[:2] == ["first", "last"]


def test_a_script_gets_the_modules_of_its_own_folder(tmp_path: Path) -> None:
    assert local_gang.run(RANKS + "scripts", 1, str(tmp_path)) == "one one two two "
