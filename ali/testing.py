"""Conformance tests for libraries, which authors subclass::

    import numpy as np
    from ali.testing import Case, LibraryTests

    A = np.arange(30.0).reshape(10, 3)

    class TestMylib(LibraryTests):
        library = "mylib"
        path = "build/libmylib.so"
        cases = (
            Case("scale", {"A": A, "factor": 3.0}, [3 * A]),
            Case("scale", {"A": A.astype("int32")}, raises="float64"),
        )

pytest then runs the library on gangs of real MPI ranks, without Ray: every case with its
matrices in each of the 14 layouts and in blocks, and with matrices of bool, without rows and with
one dimension, which it may refuse; sparse matrices also with elements in another order and at the
same place, and, which it may refuse, without any; the declared signatures; a failure on all ranks,
on one rank while the others wait for it, and a call that is cancelled, after each of which the gang
must go on; loading and unloading again and again.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mpi_workers.local import local_gang

SHOWN = 5  # number of faults of a check that are printed


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a routine, and its expected outcome.

    Parameters
    ----------
    routine : str
        Its name.
    arguments : mapping
        By name; a matrix as a NumPy array of one or two dimensions, a sparse one as SciPy's.
        Omitted ones have their defaults.
    expected : sequence, optional
        One value per result: an array for a matrix, also a sparse one, 1-D for a vector, None for
        any value. Without it only types and shapes are checked.
    raises : str, optional
        The call must fail on all ranks, with this text in the message.
    rtol : float
        Allowed error of a number, relative to the largest of its matrix.
    fresh : bool
        Load the library again before the call, for a routine whose result depends on earlier
        calls. (The suite calls every case many times.)
    changed : mapping, optional
        Arguments that the routine changes in place, which it must declare (``writes``), with their
        values after the call. Others must not change, but those that it declares may.
    layouts : sequence of str, optional
        The layouts of matrices that the routine takes, for one that computes in place or does not
        redistribute. It may refuse others, on all ranks. By default it must take all.
    """

    routine: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    expected: Sequence[Any] | None = None
    raises: str | None = None
    rtol: float = 1e-9
    fresh: bool = False
    changed: Mapping[str, Any] = field(default_factory=dict)
    layouts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Suite:
    """A library and its cases, as sent to the ranks."""

    library: str
    path: str | None
    cases: tuple[Case, ...]
    interruptible: bool
    patience_s: float


class GangTests:
    """Tests of a library on gangs of several sizes."""

    library: ClassVar[str]
    path: ClassVar[str | os.PathLike[str] | None] = None
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 6)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every test on every size of gang."""
        if "size" in metafunc.fixturenames:
            assert metafunc.cls is not None
            metafunc.parametrize("size", metafunc.cls.sizes)

    def _file(self) -> str | None:
        """The absolute path of `path`, or None without one. Fails the test if no file is there."""
        path = None if self.path is None else Path(self.path).absolute()
        if path is not None and not path.is_file():
            pytest.fail(f"{path} does not exist: build it first", pytrace=False)
        return None if path is None else str(path)


class LibraryTests(GangTests):
    """Base class of a library's tests; a subclass has a name that begins with ``Test``.

    Attributes
    ----------
    library : str
        Its name.
    path : path_like, optional
        Its file; None for a shipped or an installed library.
    cases : sequence of Case
        At least one for every routine. One of them should fail, and one should have a matrix
        with fewer rows or columns than there are ranks, so that some hold nothing.
    sizes : sequence of int
        How many ranks the gangs have.
    interruptible : bool
        Whether ranks in a routine notice that the call has failed on another rank. False for a
        library whose waits are inside native code: its gang is ended when one rank fails.
    patience_s : float
        How long ranks may take to notice.
    timeout_s : float
        For everything on one gang.
    """

    cases: ClassVar[Sequence[Case]] = ()
    interruptible: ClassVar[bool] = True
    patience_s: ClassVar[float] = 10.0
    timeout_s: ClassVar[float] = 100.0

    def test_its_signatures_are_whole(self, size: int) -> None:
        self._judge(size, "signatures")

    def test_its_results_are_right_in_every_layout(self, size: int) -> None:
        self._judge(size, "results")

    def test_ranks_without_elements_take_part(self) -> None:
        if not self._found(max(self.sizes))["empty"]:
            pytest.fail("add a case with fewer rows or columns than ranks", pytrace=False)

    def test_a_failure_on_all_ranks_fails_the_call_alone(self, size: int) -> None:
        if all(case.raises is None for case in self.cases):
            pytest.skip("no case fails: add one with raises='...'")
        self._judge(size, "failures")

    def test_bool_vectors_and_matrices_without_rows_end_alike(self, size: int) -> None:
        self._judge(size, "unusual")

    def test_a_failure_on_one_rank_lets_the_others_go(self, size: int) -> None:
        self._need_interrupts()
        if size == 1:
            pytest.skip("one rank waits for no other")
        self._judge(size, "one_rank")

    def test_a_cancelled_call_leaves_a_gang_that_works(self, size: int) -> None:
        self._need_interrupts()
        self._judge(size, "cancelled")

    def test_it_can_be_loaded_again_and_again(self, size: int) -> None:
        self._judge(size, "reloads")

    def _judge(self, size: int, check: str) -> None:
        """Fail with the faults that a check has found."""
        wrong = self._found(size)[check]
        if wrong:
            more = f"\n\n... and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            pytest.fail("\n\n".join(wrong[:SHOWN]) + more, pytrace=False)

    def _need_interrupts(self) -> None:
        if not self.interruptible:
            pytest.skip("its waits are inside a native library and cannot be interrupted")

    def _found(self, size: int) -> dict[str, Any]:
        """The results of the ranks; one launch for each class and size, also after a failure."""
        key = (type(self), size)
        if key not in _launched:
            try:
                _launched[key] = self._launch(size)
            except AssertionError as error:
                _launched[key] = error
        found = _launched[key]
        if isinstance(found, AssertionError):
            pytest.fail(str(found), pytrace=False)
        return found

    def _launch(self, size: int) -> dict[str, Any]:
        suite = Suite(
            self.library, self._file(), tuple(self.cases), self.interruptible, self.patience_s
        )
        with tempfile.TemporaryDirectory(prefix="suite-") as folder:
            file = Path(folder, "suite.pickle")
            file.write_bytes(pickle.dumps(suite))
            found: dict[str, Any] = {"next": 0, "sound": ()}
            while "next" in found:
                more = local_gang.run(
                    "ali.conformance:check", size, str(file), found.pop("next"), found.pop("sound"),
                    timeout=self.timeout_s, timeout_name=f"{type(self).__name__}.timeout_s",
                )  # fmt: skip
                for check in found.keys() & more.keys():
                    more[check] += found[check]
                found |= more
            return found


_launched: dict[tuple[type, int], dict[str, Any] | AssertionError] = {}
