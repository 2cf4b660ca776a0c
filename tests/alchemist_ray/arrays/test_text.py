"""Handles print as arrays of NumPy, and never wait for a running call to do so."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from tests.support import traces

SLOW_S = 4.0


def test_numbers_are_printed_as_numpy_does(session: AlchemistSession) -> None:
    for shape in [(), (0,), (5,), (3, 4), (40, 30), (2000,), (2000, 3), (3, 2000), (0, 7)]:
        a = np.arange(float(np.prod(shape))).reshape(shape)
        A = session.send_matrix(a) if shape else session.xp.asarray(a)
        with np.printoptions(threshold=1000):
            assert str(A) == (str(a[()]) if not shape else np.array2string(a))


def test_repr_tells_name_layout_and_memory(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones((300, 40)), layout="MC_MR", name="<b>")
    text, page = repr(A), A._repr_html_()
    for told in ("300", "40", "float64", "MC_MR", "96.0 kB"):
        assert told in text
        assert told in page
    assert "<b>" in text
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    A.free()
    assert "(freed)" in repr(A)
    assert "(freed)" in A._repr_html_()


def test_text_does_not_wait_for_a_call(session: AlchemistSession) -> None:
    A = session.xp.ones((2000, 3))

    def slow(comm: Any, seconds: float = SLOW_S) -> None:
        time.sleep(seconds)

    call = threading.Thread(target=session.run, args=(slow,))
    call.start()
    found = set()
    while call.is_alive():
        before = traces.clock()
        found.add(str(A))
        assert traces.clock() - before < SLOW_S
        time.sleep(0.05)
    assert "(a call is running on the gang)" in found
    assert str(A).startswith("[[1.")


def test_text_of_an_ended_session(cluster: str) -> None:
    with AlchemistSession(1) as als:
        A = als.xp.ones((300, 40))
    assert "freed" in repr(A) or "session has ended" in repr(A)


def test_a_small_expression_is_one_command(session: AlchemistSession, sent: list[str]) -> None:
    A = session.send_matrix(np.linspace(0, 99, 1000).reshape(100, 10))
    mask = (A > 3).computed()
    for work in [
        lambda: (A + 1).id, lambda: (A * 2 - np.ones(10)).id, lambda: A.sum(axis=0),
        lambda: float(A.mean()),
        lambda: print(A.max(axis=0)), lambda: float(A[3, 4]), lambda: A[:, 0, None],
        lambda: np.sort(A, axis=0), lambda: np.median(A).item(), lambda: np.cumsum(A).tolist(),
        lambda: A.astype(bool), lambda: np.exp(A), lambda: np.where(mask, A, 0).id,
        lambda: np.where(mask, 1, 0).id, lambda: np.where(mask, np.ones(10), A),
    ]:  # fmt: skip
        sent.clear()
        work()
        assert len(sent) == 1


def test_several_results_are_a_line_each(als: AlchemistSession) -> None:
    A = als.send_matrix(np.random.default_rng(0).random((40, 5)))
    found = als.load_library("linalg").pca(A, 2)
    lines = str(found).splitlines()
    assert repr(found) == str(found)
    assert len(lines) == 2 + len(found)
    assert lines[1].startswith("  components=<Handle matrix")
    assert "2 x 5 float64" in lines[1]
    assert "<tr><th>scores</th><td>&lt;Handle matrix" in found._repr_html_()
    assert max(map(len, lines)) < 120
