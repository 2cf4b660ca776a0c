"""Ranks that tests share: starting ranks takes longer than most checks.

`run` gives a function to ranks that have run others before, `results` also keeps its result. What
changes its process for good (native libraries, variables, interrupts) or measures its memory gets
ranks of its own from `local_gang.run`.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from mpi_workers.local import local_gang

LOOK_S = 0.1  # between two looks whether the ranks are alive
LIFE_S = 6 * 3600.0
SERVE = "tests.support.ranks_shared:serve"


class _Ranks:
    """Ranks that run one function after the other; each reads its orders from a named pipe."""

    def __init__(self, ranks: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shared-"))
        self._orders = [self._pipe(str(rank)) for rank in range(ranks)]
        self._result = self._pipe("result")
        self._error = AssertionError("the ranks have ended")
        self.thread = threading.Thread(target=self._serve, args=(ranks,), daemon=True)
        self.thread.start()

    def _pipe(self, name: str) -> int:
        os.mkfifo(self._folder / name)
        return os.open(self._folder / name, os.O_RDWR)  # does not wait for the other end

    def _serve(self, ranks: int) -> None:
        try:
            local_gang.run(SERVE, ranks, str(self._folder), timeout=LIFE_S)
        except AssertionError as error:
            self._error = error

    def run(self, function: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        order = json.dumps([function, arguments, timeout]).encode() + b"\n"
        for pipe in self._orders:
            os.write(pipe, order)
        found = b""
        while not found.endswith(b"\n"):
            if select.select([self._result], [], [], LOOK_S)[0]:
                found += os.read(self._result, 1 << 20)
            elif not self.thread.is_alive():
                raise self._error
        return json.loads(found)

    def close(self) -> None:
        """Let the ranks end when they have run their function."""
        for pipe in (*self._orders, self._result):
            os.close(pipe)
        shutil.rmtree(self._folder)


_shared: dict[int, _Ranks] = {}


def run(function: str, ranks: int, *arguments: Any, timeout: float = 60.0) -> Any:
    """The same as `local_gang.run`, on shared ranks; after a failure the next call has new ones."""
    gang = _shared.pop(ranks, None) or _Ranks(ranks)
    try:
        found = gang.run(function, arguments, timeout)
    except BaseException:
        gang.close()
        raise
    _shared[ranks] = gang
    return found


def close() -> None:
    """End all shared ranks."""
    while _shared:
        _, gang = _shared.popitem()
        gang.close()
        gang.thread.join()
    local_gang.close()


@functools.cache
def _launched(
    function: str, ranks: int, *arguments: Any, timeout: float, shared: bool
) -> dict[str, Any] | AssertionError:
    start = run if shared else local_gang.run
    try:
        found: dict[str, Any] = start(function, ranks, *arguments, timeout=timeout)
    except AssertionError as error:
        return error
    return found


def results(
    function: str, ranks: int, *arguments: Any, timeout: float = 280, shared: bool = True
) -> dict[str, Any]:
    """The result of a function on this many ranks, from one call, also if it fails."""
    found = _launched(function, ranks, *arguments, timeout=timeout, shared=shared)
    if isinstance(found, AssertionError):
        raise found
    return found


def check_right(found: tuple[int, list[Any]], least: float = 1) -> None:
    """Check that so many checks were made on ranks, and that nothing was wrong."""
    done, wrong = found
    assert wrong == []
    assert done >= least


def check_refused_alike(found: list[tuple[str, list[str]]], ranks: int) -> None:
    """Check that all ranks refused each call with the same message, which begins as it must."""
    wrong = [
        (words, said)
        for words, said in found
        if len(said) != ranks or len(set(said)) > 1 or not said[0].startswith(words)
    ]
    assert wrong == []
    assert found
