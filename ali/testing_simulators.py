"""Conformance tests for simulators, which authors subclass::

    from ali.testing_simulators import SimulatorTests

    class TestMysim(SimulatorTests):
        library = "mysim"
        path = "build/libmysim.so"

pytest then runs episodes with random actions on gangs of real MPI ranks, without Ray: numbers are
finite; a seed determines an episode, also after other episodes and in another gang; the records are
the same bits on any number of ranks; copies do not affect one another; a saved state is restored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from ali.testing import GangTests
from mpi_workers.local import local_gang


class SimulatorTests(GangTests):
    """Base class of a simulator's tests; a subclass has a name that begins with ``Test``.

    Attributes
    ----------
    library : str
        Its name.
    path : path_like, optional
        Its file; None for a shipped or an installed simulator.
    sim : mapping
        Options for its ``setup``.
    sizes : sequence of int
        How many ranks the gangs have.
    steps : int
        Steps of an episode.
    same_bits : bool
        Whether the results are independent of the number of ranks, to the last bit.
    timeout_s : float
        For everything on one gang.
    """

    sim: ClassVar[Mapping[str, Any]] = {}
    sizes: ClassVar[Sequence[int]] = (1, 2, 3)
    steps: ClassVar[int] = 20
    same_bits: ClassVar[bool] = True
    timeout_s: ClassVar[float] = 60.0

    def test_its_numbers_are_finite(self, size: int) -> None:
        faults = self._run(size)["faults"]
        if faults:
            pytest.fail("\n".join(faults[:5]), pytrace=False)

    def test_a_seed_determines_an_episode(self, size: int) -> None:
        found = self._run(size)
        first, other, again = found["records"]
        if first != again:
            pytest.fail(
                f"episodes with the same seed differ: {_first_difference(first, again)}. Draw all "
                "random numbers of an episode from its seed",
                pytrace=False,
            )
        if found["seeded"] and first == other:
            pytest.fail("episodes with the seeds 1 and 2 are equal", pytrace=False)

    def test_another_gang_repeats_an_episode(self, size: int) -> None:
        if self._run(size)["records"] != self._run(size, again=True)["records"]:
            pytest.fail("another gang has other results for the same seeds", pytrace=False)

    def test_the_number_of_ranks_changes_no_bit(self, size: int) -> None:
        if not self.same_bits:
            pytest.skip("same_bits = False")
        alone, here = self._run(self.sizes[0])["records"][0], self._run(size)["records"][0]
        if alone != here:
            pytest.fail(
                f"{size} ranks differ from {self.sizes[0]}: {_first_difference(alone, here)}. Sums "
                "over ranks depend on their order; or set same_bits = False",
                pytrace=False,
            )

    def test_copies_do_not_affect_one_another(self, size: int) -> None:
        one, several = self._run(self.sizes[0])["records"], self._run(size, copies=2)["records"]
        if self.same_bits and [step[0] for step in several[0]] != [step[0] for step in one[0]]:
            pytest.fail("the first of two copies differs from a single simulation", pytrace=False)
        if several[0] != several[2]:
            pytest.fail("two copies differ in the second episode of a seed", pytrace=False)

    def test_a_saved_state_is_restored(self, size: int) -> None:
        restored = self._run(size)["restored"]
        if restored is None:
            pytest.skip("it has no save_state and load_state")
        assert restored, "a step from a restored state has another result"

    def _run(self, size: int, copies: int = 1, again: bool = False) -> dict[str, Any]:
        key = (type(self), size, copies, again)
        if key not in _found:
            _found[key] = local_gang.run(
                "ali.conformance:episodes", size, self.library, self._file(),
                json.dumps(dict(self.sim)), [1, 2, 1], self.steps, copies,
                timeout=self.timeout_s, timeout_name=f"{type(self).__name__}.timeout_s",
            )  # fmt: skip
        return _found[key]


def _first_difference(one: list[Any], other: list[Any]) -> str:
    step = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return "after reset" if step == 0 else f"in step {step}"


_found: dict[tuple[type, int, int, bool], dict[str, Any]] = {}
