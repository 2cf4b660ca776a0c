"""Rank side of test_mpi4py_suite.py."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Iterator
from typing import Any

from mpi_workers.rank.gang_view import GangView
from mpi_workers.waits import interruption


def _tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        yield from _tests(each) if isinstance(each, unittest.TestSuite) else (each,)


def module(gang: GangView, folder: str, name: str, left_out: list[str]) -> list[Any]:
    """Run a module of the suite: the tests of this rank, and those that failed on any rank."""
    sys.path.insert(0, folder)
    sys.argv[1:] = []
    result = unittest.TestResult()
    found = _tests(unittest.defaultTestLoader.loadTestsFromName(name))
    unittest.TestSuite(test for test in found if test.id() not in left_out).run(result)
    wrong = [(test.id(), said) for test, said in result.failures + result.errors]
    wrong += [(test.id(), "unexpected success") for test in result.unexpectedSuccesses]
    with interruption.uninterruptible():
        every = gang.world.allgather(wrong)
    return [result.testsRun, {ident: said for its in every for ident, said in its}]
