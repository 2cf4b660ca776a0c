"""Rank side of test_mpi4py_suite.py."""

from __future__ import annotations

import sys
import unittest
from typing import Any

from mpi_workers.rank.gang_view import GangView
from mpi_workers.waits import interruption


def module(gang: GangView, folder: str, name: str) -> list[Any]:
    """Run a module of the suite: the tests of this rank, and those that failed on any rank."""
    sys.path.insert(0, folder)
    sys.argv[1:] = []
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromName(name).run(result)
    wrong = [(test.id(), said) for test, said in result.failures + result.errors]
    wrong += [(test.id(), "unexpected success") for test in result.unexpectedSuccesses]
    with interruption.uninterruptible():
        every = gang.world.allgather(wrong)
    found = {ident: said for its in every for ident, said in its}
    return [result.testsRun, found]
