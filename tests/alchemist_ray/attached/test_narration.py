"""``AlchemistSession(verbose=True)``: what it prints, and that others print nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import RoutineError


def test_a_verbose_session_prints_its_steps(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with AlchemistSession(2, verbose=True) as session:
        lib = session.load_library("linalg")
        A = session.send_matrix(np.eye(100), layout="MC_MR", name="A")
        lib.truncated_svd(A, rank=3)
        with pytest.raises(RoutineError):
            lib.cholesky(-A)
        session.run(lambda comm: comm.size)
        session.fetch_matrix(A)
        with session.profile():
            pass
    out = capsys.readouterr().out
    assert "Allocated 2 workers:\n  rank 0 on " in out
    steps = (
        r"Library linalg: done in \d+\.\d{3} s",
        r"Send of A as MC_MR: done in ",
        r"Task linalg\.truncated_svd\(A \(100 x 100, float64, MC_MR, 80\.0 kB\), rank=3\) \.\.\.",
        r"rank=3\): done in \d+\.\d{3} s",
        r"Task linalg\.cholesky\(.*\): LinAlgError after ",
        r"Function .*<lambda>: done in ",
        r"Fetch of A \(100 x 100, float64, MC_MR, 80\.0 kB\): done in ",
    )
    assert "collected" not in out
    for step in steps:
        assert re.search(step, out), (step, out)


def test_other_sessions_print_nothing(
    session: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    A = session.send_matrix(np.eye(10))
    session.load_library("linalg").norm(A)
    assert capsys.readouterr().out == ""


def test_an_attached_session_can_be_verbose(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with AlchemistSession(1, name="quiet") as first:
        first.send_matrix(np.eye(3), name="A")
        assert capsys.readouterr().out == ""
        with AlchemistSession.attach("quiet", verbose=True) as second:
            second.fetch_matrix(second.matrix("A"))
    assert "Fetch of A (3 x 3, float64, VC_STAR, 72 B)" in capsys.readouterr().out
