"""The checks of `ali.testing`, which run on every rank of a small gang.

Each check returns descriptions of faults, the same on every rank or only valid on rank 0.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from ali import registry, sparse_matrices
from ali.interface import Context
from ali.simulator.host import Simulations
from ali.testing import Case, Suite
from mpi_workers.failures import Failure, Interrupted
from mpi_workers.local import local_gang
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import LAYOUTS
from mpi_workers.protocol.signature import MATRIX, SPARSE, is_sparse

if TYPE_CHECKING:
    from mpi_workers.rank.gang_view import GangView

CANCEL_S = 0.005  # how far into a call it is cancelled
RELOADS = 3
TRIED = (*LAYOUTS, "BLOCK", "BLOCK_CYCLIC:2")
UNUSUAL: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "bool": lambda array: array != 0,
    "no rows": lambda array: array[:0],
    "vectors": lambda array: array.reshape(len(array), -1)[:, 0],
}


def _unordered(matrix: Any) -> Any:
    """The same matrix: each row from its last element on, and a zero at the place of each."""
    rows = coo_array(matrix)
    places = [np.repeat(x[::-1], 2) for x in rows.coords]
    values = np.zeros(2 * rows.nnz, rows.dtype)
    values[::2] = rows.data[::-1]
    order = np.argsort(places[0], kind="stable")
    starts = np.searchsorted(places[0][order], np.arange(rows.shape[0] + 1))
    return csr_array((values[order], places[1][order], starts), shape=rows.shape)


UNUSUAL_SPARSE: dict[str, Callable[[Any], Any]] = {
    "no elements": lambda matrix: csr_array(matrix.shape, dtype=matrix.dtype),
    "no rows": lambda matrix: csr_array(matrix)[:0],
}


def check(gang: GangView, file: str, first: int, sound: Sequence[int]) -> dict[str, Any]:
    """Run all checks of a suite on this gang; faults by check, on rank 0.

    After an interrupted call that MPI may still write for, a gang starts other ranks. Then the
    checks end, with ``next``: `first` for other processes, which go on there, and ``sound``: the
    numbers of the cases whose results were right.
    """
    suite: Suite = pickle.loads(Path(file).read_bytes())
    return _Checker(gang, suite).run(first, sound)


class _Checker:
    def __init__(self, gang: GangView, suite: Suite) -> None:
        self.gang = gang
        self.suite = suite
        self.ctx = Context(gang, {})
        self.calls = 1  # the number of the call under way, as the rank's loop would count
        self.saw_empty = False
        self.sound: list[Case] = []  # cases whose results were right
        self.library = registry.load(suite.library, suite.path)
        self.signatures = self.library.signatures
        self.writes = {
            about["name"]: about.get("writes") or ()
            for about in self.library.describe()["routines"]
        }

    def run(self, first: int, sound: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.sound = [self.suite.cases[number] for number in sound]
        if first == 0:
            found["results"] = self.results()  # which the other checks need, too
            found["signatures"] = self.declared()
            found["failures"] = self.failures()
            found["unusual"] = self.unusual()
            found["empty"] = any(self.everyone(self.saw_empty))
        if self.suite.interruptible:
            found |= {"one_rank": [], "cancelled": []}
            for number, (check, wrong) in enumerate(self.interruptions(first), first):
                if wrong is None:
                    places = {id(case): place for place, case in enumerate(self.suite.cases)}
                    sound = [places[id(case)] for case in self.sound]
                    return {**found, "next": number + 1, "sound": sound}
                found[check] += wrong
        found["reloads"] = self.reloads()
        return found

    # --- the checks ---

    def declared(self) -> list[str]:
        """Documentation, and a case for every routine."""
        wrong = [] if self.library.describe()["doc"] else ["the library has no documentation"]
        tried = {case.routine for case in self.suite.cases}
        for name, signature in self.signatures.items():
            if not signature.doc:
                wrong.append(f"{name} has no documentation")
            if name not in tried:
                wrong.append(f"{name} has no case")
        return wrong + [f"there is no routine {name}" for name in tried - set(self.signatures)]

    def results(self) -> list[str]:
        """Every case that should work, its matrices in every layout, also in blocks."""
        wrong: list[str] = []
        for case in self.good():
            before = len(wrong)
            tried = [*TRIED, *case.layouts] if self.matrices(case) else TRIED[:1]
            for layout in dict.fromkeys(tried):
                if case.layouts and layout not in case.layouts:
                    refused = all(self.outcomes(case, layout, f"{case.routine} in {layout}"))
                    self.renew()
                    if refused:
                        continue
                for words in self.tried(case, layout):
                    wrong.append(f"{case.routine}, matrices in {layout}: {words}")
            if given := self.matrices(case, SPARSE):
                changed = {name: _unordered(case.arguments[name]) for name in given}
                other = replace(case, arguments={**case.arguments, **changed})
                for words in self.tried(other, home(case)):
                    wrong.append(f"{case.routine}, sparse rows without order, twice: {words}")
            if len(wrong) == before:
                self.sound.append(case)
        return wrong

    def failures(self) -> list[str]:
        """Cases that must fail on all ranks; a good call works afterwards."""
        wrong = []
        for case in self.suite.cases:
            if case.raises is None or case.routine not in self.signatures:
                continue
            self.renew_library(case)
            with self.watched(f"{case.routine}, which should fail,"):
                outcome = self.outcome(case, home(case))
            everyone = self.gang.comm.allgather(outcome)
            if any(case.raises not in words for words in everyone):
                found = [words or "no error" for words in everyone]
                wrong.append(f"{case.routine}: expected {case.raises!r}, not {found}")
            wrong += self.works(f"after {case.routine} had failed")
        return wrong

    def unusual(self) -> list[str]:
        """Matrices of bool, without rows and with one dimension: all ranks succeed, or none.

        Sparse ones without elements or rows.
        """
        wrong = []
        for case in {case.routine: case for case in reversed(self.sound)}.values():
            dense = {name: np.asarray(case.arguments[name]) for name in self.matrices(case)}
            sparse = {name: case.arguments[name] for name in self.matrices(case, SPARSE)}
            changes = [(*change, dense) for change in UNUSUAL.items() if dense]
            changes += [(*change, sparse) for change in UNUSUAL_SPARSE.items() if sparse]
            for what, change, given in changes:
                changed = {name: change(array) for name, array in given.items()}
                odd = replace(case, arguments={**case.arguments, **changed})
                everyone = self.outcomes(odd, home(case), f"{case.routine} of {what}")
                if any(everyone) and not all(everyone):
                    wrong.append(f"{case.routine} of {what} fails on some ranks only: {everyone}")
                wrong += self.works(f"after {case.routine} of {what}")
        return wrong

    def interruptions(self, first: int) -> Iterator[tuple[str, list[str] | None]]:
        """Of each interrupted call the check and its faults; None: these processes cannot go on."""
        steps: list[tuple[str, Case, float]] = []
        if self.gang.size > 1:
            steps += [("one_rank", case, 0.0) for case in self.sound]
        steps += [("cancelled", case, wait) for case in self.sound for wait in (0.0, CANCEL_S)]
        for check, case, delay in steps[first:]:
            if check == "one_rank":
                self.fail_on_one_rank(case)
                when = f"after {case.routine} had failed on one rank"
            else:
                self.cancel(case, delay)
                when = f"after {case.routine} was cancelled"
            unsafe = any(self.everyone(local_gang.unsafe()))
            yield check, None if unsafe else self.works(when)

    def fail_on_one_rank(self, case: Case) -> None:
        """The last rank fails before the routine: the others must not wait for it."""
        prepared = self.arguments(case, home(case))
        self.everyone()
        with self.watched(f"{case.routine} on the other ranks, when one had failed before it,"):
            if self.gang.rank == self.gang.size - 1:
                threading.Timer(CANCEL_S, local_gang.interrupt, [self.calls]).start()
            else:
                self.interrupted(case, prepared)

    def cancel(self, case: Case, delay: float) -> None:
        """Cancelled before the call, or a moment later."""
        prepared = self.arguments(case, home(case))
        self.everyone()
        with self.watched(f"{case.routine}, when cancelled,"):
            timer = threading.Timer(delay, local_gang.interrupt, [self.calls])
            if delay:
                timer.start()
            else:
                local_gang.interrupt(self.calls)
            self.interrupted(case, prepared)
            if delay:
                timer.join()

    def reloads(self) -> list[str]:
        """Closed and loaded again: the same routines, and they work."""
        wrong = []
        for _ in range(RELOADS):
            before = self.library.describe()
            self.library.close()
            self.library = registry.load(self.suite.library, self.suite.path)
            if self.library.describe() != before:
                wrong.append("its description differs when it is loaded again")
            wrong += self.works("when loaded again")
        self.library.close()
        self.library.close()  # twice is fine
        self.library = registry.load(self.suite.library, self.suite.path)
        return wrong

    # --- calls ---

    def good(self) -> Iterator[Case]:
        """Cases that should work, of routines that there are (see `declared`)."""
        known = (case for case in self.suite.cases if case.routine in self.signatures)
        return (case for case in known if case.raises is None)

    def matrices(self, case: Case, kind: str = MATRIX) -> list[str]:
        parameters = self.signatures[case.routine].parameters
        return [
            p.name for p in parameters if p.type == kind and case.arguments.get(p.name) is not None
        ]

    def arguments(self, case: Case, layout: str) -> dict[str, Any]:
        """Checked as the client does, with matrices spread over the gang. Local."""

        def matrix(value: Any) -> DistMatrix:
            if is_sparse(value):
                made = sparse_matrices.from_whole(self.gang, value)
                self.saw_empty |= made.local.nnz == 0
                return made.packed
            distribution = self.ctx.new_replicated(np.asarray(value), layout)
            self.saw_empty |= distribution.local.size == 0
            return distribution

        return self.signatures[case.routine].bind((), dict(case.arguments), matrix)

    def call(self, case: Case, arguments: Mapping[str, Any]) -> list[Any]:
        with local_gang.EndedWaits():
            return list(self.library.call(self.gang, case.routine, arguments))

    def everyone(self, value: Any = None) -> list[Any]:
        """The values of all ranks. The interrupt does not end this wait."""
        with local_gang.uninterruptible():
            return self.gang.world.allgather(value)

    def outcome(self, case: Case, layout: str) -> str:
        """The message of a call that fails; empty if it succeeds."""
        try:
            self.call(case, self.arguments(case, layout))
        except Failure as failure:
            return f"{failure.kind}: {failure.message}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def outcomes(self, case: Case, layout: str, what: str) -> list[str]:
        """Those of all ranks. A new communicator is needed then."""
        self.renew_library(case)
        with self.watched(what):
            outcome = self.outcome(case, layout)
            if outcome:
                local_gang.interrupt(self.calls)  # the others may wait for this rank
            return self.everyone(outcome)

    def interrupted(self, case: Case, arguments: Mapping[str, Any]) -> None:
        """A call that may complete or be interrupted, but not fail."""
        with suppress(Interrupted):
            self.call(case, arguments)

    def works(self, when: str) -> list[str]:
        """On a sound communicator, as the rank's loop makes one after a failure."""
        self.renew()
        if not self.sound:
            return []  # `results` has said why
        case = self.sound[0]
        return [f"{case.routine} {when}: {words}" for words in self.tried(case, home(case))]

    def renew(self) -> None:
        """The next call: a fresh communicator, and waits that belong to it."""
        self.calls += 1
        local_gang.begin(self.calls)
        self.gang.renew()

    def renew_library(self, case: Case) -> None:
        if case.fresh:
            self.library.close()
            self.library = registry.load(self.suite.library, self.suite.path)

    def tried(self, case: Case, layout: str) -> list[str]:
        """Call a case that should work; its faults, the same on all ranks."""
        print(f"rank {self.gang.rank}: {case.routine}, matrices in {layout}", flush=True)
        self.renew_library(case)
        wrong: list[str] = []
        broken = ""
        try:
            wrong = self.results_of(case, layout)
        except Interrupted:
            broken = "another rank has failed"
        except Exception as error:
            local_gang.interrupt(self.calls)  # the others may wait for this rank
            kind = error.kind if isinstance(error, Failure) else type(error).__name__
            broken = f"it failed on rank {self.gang.rank}: {kind}: {error}"
        everyone = self.everyone((broken, wrong))
        if any(words for words, _ in everyone):
            self.renew()
            return [max((w for w, _ in everyone), key=lambda words: words.startswith("it failed"))]
        return max((faults for _, faults in everyone), key=len)  # the same on all ranks

    def results_of(self, case: Case, layout: str) -> list[str]:
        """Call a case; the faults of its results."""
        with self.watched(case.routine):
            arguments = self.arguments(case, layout)
            returned = self.call(case, arguments)
            results = self.signatures[case.routine].results
            if len(returned) != len(results):
                return [f"{len(returned)} results instead of {len(results)}"]
            wrong = [
                f"the case expects changes of {name}, but it has no matrix of that name"
                for name in case.changed.keys() - set(self.matrices(case))
            ]
            expected = case.expected or [None] * len(results)
            if len(expected) != len(results):
                return [
                    f"the case expects {len(expected)} results, but {len(results)} are declared"
                ]
            for result, value, wanted in zip(results, returned, expected, strict=True):
                whole = value
                if result.type == MATRIX:
                    form = (value.array_shape, value.dtype.name, value.layout)
                    everyone = set(self.gang.comm.allgather(form))
                    if len(everyone) > 1:
                        wrong.append(f"{result.name} differs between ranks: {sorted(everyone)}")
                        continue
                    whole = self.whole(value)
                elif result.type == SPARSE:
                    whole = self.whole_sparse(value)
                elif self.gang.rank != 0:
                    continue  # values that are not matrices are those of rank 0
                if wanted is not None and not _equal(whole, wanted, case.rtol):
                    wrong.append(f"{result.name} is\n{whole}\nand not\n{wanted}")
            for name in self.matrices(case, SPARSE):
                whole = self.whole_sparse(arguments[name])
                if not np.array_equal(whole, case.arguments[name].toarray(), equal_nan=True):
                    wrong.append(f"it has changed its argument {name}, a sparse matrix")
            for name in self.matrices(case):
                whole = self.whole(arguments[name])
                declared = name in self.writes[case.routine]
                if name in case.changed and declared:
                    wanted = case.changed[name]
                    if not _equal(whole, wanted, case.rtol):
                        wrong.append(f"it has changed {name} to\n{whole}\nand not to\n{wanted}")
                elif not declared and not np.array_equal(
                    whole, case.arguments[name], equal_nan=True
                ):
                    wrong.append(f"it has changed its argument {name} and declares no `writes`")
            return wrong

    def whole(self, matrix: DistMatrix) -> NDArray[Any]:
        """All elements, on every rank. Collective."""
        return self.ctx.to_layout(matrix, "STAR_STAR").local.reshape(matrix.array_shape)

    def whole_sparse(self, packed: DistMatrix) -> NDArray[Any]:
        """The same of a sparse matrix, with its zeros. Collective."""
        rows = self.gang.comm.allgather(sparse_matrices.on_ranks(self.gang, packed).local.toarray())
        return np.concatenate(rows)

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """End this rank with a message, if the block takes too long."""
        timer = threading.Timer(self.suite.patience_s, _give_up, [what, self.suite.patience_s])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def home(case: Case) -> str:
    """A layout that the routine takes."""
    return case.layouts[0] if case.layouts else "VC_STAR"


def _give_up(what: str, patience_s: float) -> None:
    print(
        f"{what} did not return in {patience_s:.0f} s. Waits in MPI end with the call; in long "
        "loops without MPI use alchemist_check, in Python ctx.check(); or set interruptible = "
        "False",
        flush=True,
    )
    faulthandler.dump_traceback()
    sys.stdout.flush()
    os._exit(1)


def _equal(found: Any, wanted: Any, rtol: float) -> bool:
    if isinstance(wanted, str | bytes | list) and not isinstance(found, np.ndarray):
        return bool(found == wanted)
    wanted = wanted.toarray() if is_sparse(wanted) else wanted
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape:
        return False
    scale = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
    return bool(np.allclose(found, wanted, rtol=rtol, atol=rtol * scale, equal_nan=True))


def episodes(
    gang: GangView, name: str, path: str | None, sim: str, seeds: list[int], steps: int, copies: int
) -> dict[str, Any]:
    """Run episodes one after another, each with the same random actions.

    Returns
    -------
    dict
        ``spec``; ``records``: for each episode and step, a digest of each copy's record;
        ``faults``: what is wrong with the numbers; ``restored``: whether a saved state led to the
        same records, None if the simulator has none.
    """
    ctx = Context(gang, {})
    host = Simulations(ctx, lambda: registry.load(name, path), name, sim, copies)
    spec = json.loads(host.spec.text)
    faults: list[str] = []
    digests: list[list[list[str]]] = []

    def kept(raw: bytes, which: str) -> list[str]:
        table = np.frombuffer(raw, host.spec.layout)
        for field in host.spec.layout.names or ():
            if not np.isfinite(table[field]).all():
                faults.append(f"{which}: {field} is not finite")
        return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in table]

    for number, seed in enumerate(seeds):
        random = np.random.default_rng(7)
        copy_seeds = {copy: seed + copy for copy in range(copies)}
        nothing = np.empty((0, host.spec.actions))
        episode = [kept(host.run(ctx, copy_seeds, nothing), f"episode {number}, reset")]
        for step in range(steps):
            actions = np.tile(_action(spec["action"], spec["agents"], random), (copies, 1))
            episode.append(kept(host.run(ctx, {}, actions), f"episode {number}, step {step}"))
        digests.append(episode)
    restored = None
    if copies == 1 and host.has("save_state") and host.has("load_state"):
        action = _action(spec["action"], spec["agents"], np.random.default_rng(8))[None]
        state = host.save(ctx)
        first = kept(host.run(ctx, {}, action), "after save_state")
        host.run(ctx, {}, action)
        host.load(ctx, state)
        restored = first == kept(host.run(ctx, {}, action), "after load_state")
    seeded = host.has("seed")
    host.close()
    return {
        "spec": spec, "records": digests, "faults": faults, "restored": restored, "seeded": seeded,
    }  # fmt: skip


def _action(space: dict[str, Any], agents: int, random: np.random.Generator) -> Any:
    """A random action of all agents within the bounds."""
    if "dict" in space or "tuple" in space:
        parts = space["dict"].values() if "dict" in space else space["tuple"]
        return np.concatenate([_action(part, agents, random) for part in parts])
    if "n" in space or "nvec" in space:
        counts = np.tile(space.get("nvec", [space.get("n")]), agents)
        return np.floor(random.random(len(counts)) * counts)
    size = int(np.prod(space["shape"]))
    low, high = (np.resize(0.0 if x is None else x, size) for x in (space["low"], space["high"]))
    low = low if space["low"] is not None else high - 1.0
    high = high if space["high"] is not None else low + 1.0
    return random.uniform(low, high)
