"""One launch of ranks for the tests of a file: starting ranks takes longer than most checks."""

from __future__ import annotations

import functools
from typing import Any

from mpi_workers.testing import local_gang


@functools.cache
def _launched(
    function: str, ranks: int, *arguments: Any, timeout: float
) -> dict[str, Any] | AssertionError:
    try:
        found: dict[str, Any] = local_gang.run(function, ranks, *arguments, timeout=timeout)
    except AssertionError as error:
        return error
    return found


def results(function: str, ranks: int, *arguments: Any, timeout: float = 100) -> dict[str, Any]:
    """The result of a function on this many ranks, from one launch, also if it fails."""
    found = _launched(function, ranks, *arguments, timeout=timeout)
    if isinstance(found, AssertionError):
        raise found
    return found


def check_refused_alike(found: list[tuple[str, list[str]]], ranks: int) -> None:
    """Check that all ranks refused each call with the same message, which begins as it must."""
    wrong = [
        (words, said)
        for words, said in found
        if len(said) != ranks or len(set(said)) > 1 or not said[0].startswith(words)
    ]
    assert wrong == []
    assert found
