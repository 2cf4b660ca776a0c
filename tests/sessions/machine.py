"""A state machine: random steps of three processes on one gang, and a killer of its parts.

One program is the owner, one is attached, one is a thin client whose link breaks. They send,
compute, change, fetch, share and drop matrices; ranks, data endpoints, proxies, agents, fork
servers and GroupManagers are killed, and the gang is resized meanwhile. The model is NumPy's: no
step waits for ever, no read is torn, no matrix is lost, and what all have dropped is freed.

A run is `STEPS` random steps, after which all matrices are compared and dropped. All runs use one
gang, one gateway and three programs: starting them takes seconds, a step milliseconds. What a run
has broken is whole again, or replaced, before the next one begins.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster.actors import NAMESPACE, find_gang, group_name
from alchemist_ray.errors import (
    AlchemistError,
    CancelledError,
    GroupError,
    GroupFailedError,
    GroupRecoveredError,
    SessionError,
    StaleHandleError,
    TransferError,
)
from alchemist_ray.runtime.recovery import snapshots
from mpi_workers.node.processes import descendants
from tests.faults.conftest import agent_pids, pid_of
from tests.sessions.user import STEP_LIMIT_S, Elsewhere, Here, values
from tests.support import traces
from tests.support.breakable_link import BreakableLink

NAME = "sessions"
USERS = ("owner", "attached", "thin")
WORKERS = 2
MAX_WORKERS = 4
# The gang goes on; matrices are as before the step, which is repeated.
REPEAT = (GroupRecoveredError, TransferError)
# A choice depends on what the gang holds, and must not draw more from Hypothesis.
CHOICES = st.integers(0, 2**32 - 1).map(random.Random)
# Why a matrix may be lost: ranks were lost twice while it was made again; a thin client sent it.
LOST = ("lost ranks 2 times", "it was sent from the memory of a process")
FREED_LIMIT_S = 20.0  # for what nothing refers to any more


@dataclass
class Model:
    """A matrix of the gang: its value, and who has a handle of it."""

    value: np.ndarray[Any, Any]
    named: bool = False
    holders: set[str] = field(default_factory=set)


def checkpoint_often(manager: Any) -> None:
    """Have the gangs of a GroupManager write automatic checkpoints all the time."""
    snapshots.CHECKPOINT_LEAST_S, snapshots.CHECKPOINT_INTERVAL_S = 0.2, 0.1


class World:
    """The gang and its users, which all runs of the machine share; starting them takes seconds."""

    def __init__(
        self, folder: Path, programs: dict[str, tuple[str, dict[str, str]]], link: BreakableLink
    ) -> None:
        self.folder, self.programs, self.link = folder, programs, link
        self.done: Counter[str] = Counter()
        self.keys = 0
        self.users: dict[str, Any] = {}
        self.trail: deque[str] = deque(maxlen=60)  # for the message of a failure
        self.failure: BaseException | None = None  # the first one
        self.lingering: set[int] = set()  # ids of matrices that lost processes had
        self.named: set[int] = set()  # keys of those that have names: freed at the end
        self.start()

    def start(self) -> None:
        """Start the gang, or another one if it is lost; and all users."""
        for user in self.users.values():
            user.end()
        deadline = time.monotonic() + STEP_LIMIT_S
        while True:
            try:
                als = AlchemistSession(
                    WORKERS, name=NAME, lifetime="detached", max_failures=1_000_000,
                    checkpoint_folder=self.folder / "checkpoint",
                )  # fmt: skip
                ray.get(find_gang(NAME).actor.__ray_call__.remote(checkpoint_often), timeout=20)
                break
            except (AlchemistError, ray.exceptions.RayError):
                assert time.monotonic() < deadline, "no other gang could be started"
                with contextlib.suppress(SessionError, ray.exceptions.RayError):
                    AlchemistSession.stop_gang(NAME)
                time.sleep(0.2)
        self.lingering.clear()
        self.named.clear()
        self.users = {"owner": Here(als)}
        for user in self.programs:
            self.replace(user)

    def pids(self) -> dict[str, int]:
        return {name: user.pid for name, user in self.users.items()}

    def replace(self, user: str) -> None:
        """Another process in place of one that was killed."""
        self.link.plug()
        self.users[user] = Elsewhere(NAME, self.folder, *self.programs[user])

    def end(self) -> None:
        for user in self.users.values():
            user.end()
        with contextlib.suppress(SessionError):
            AlchemistSession.stop_gang(NAME)


class _Skip(Exception):
    """A step that has no outcome: there is no matrix, or another gang is there now."""


def guarded(machine: Sessions, work: Callable[..., None], **drawn: Any) -> None:
    """Do the work of a step, unless an earlier one failed: Hypothesis repeats a failed run."""
    if machine.world.failure is not None:
        return
    try:
        with contextlib.suppress(_Skip):
            work(**drawn)
    except BaseException as error:
        error.add_note("\n".join(["the last steps:", *machine.world.trail]))
        machine.world.failure = error
        raise


def step(**drawn: Any) -> Callable[[Callable[..., None]], Any]:
    """A rule whose first failure is kept."""

    def of(method: Callable[..., None]) -> Any:
        def work(self: Sessions, **given: Any) -> None:
            guarded(self, method.__get__(self), **given)

        work.__name__ = method.__name__
        return rule(**drawn)(work)

    return of


class Sessions(RuleBasedStateMachine):
    """One run: random steps, after which everything is dropped."""

    world: World  # set by the test

    def __init__(self) -> None:
        super().__init__()
        self.matrices: dict[int, Model] = {}
        self.processes_lost = self.killed_manager = False
        self.timers: list[threading.Timer] = []
        self.world.trail.append("--- a new run")

    # --- steps ---

    def ask(self, user: str, step: str, *arguments: Any) -> Any:
        """The result of a step, repeated until the gang has done it; None if the gang is lost."""
        self.world.done[step] += 1
        if step != "ids":
            self.world.trail.append(f"{user} {step} {arguments}")
        deadline = time.monotonic() + STEP_LIMIT_S
        while True:
            try:
                return self.world.users[user].begin(step, *arguments).result(STEP_LIMIT_S + 5)
            except StaleHandleError as error:
                if not any(reason in str(error) for reason in LOST):
                    raise
                self.world.done["stale"] += 1
                self.forget_lost_ones()
                raise _Skip from None
            except REPEAT as error:
                self.world.trail.append(f"  {type(error).__name__}: {str(error)[:200]}")
                self.world.done["repeated"] += 1
                assert time.monotonic() < deadline, f"{user}: {step}{arguments} is never done"
            except (GroupFailedError, SessionError) as error:
                if not self.killed_manager:
                    raise
                self.world.done["gang lost"] += 1
                self.world.trail.append(f"  {type(error).__name__}: another gang is started")
                self.matrices.clear()
                self.world.start()
                raise _Skip from None

    def forget_lost_ones(self) -> None:
        """Matrices that could not be made again because ranks were lost twice meanwhile."""
        for key, model in list(self.matrices.items()):
            for user in sorted(model.holders):
                try:
                    self.world.users[user].begin("fetch", key).result(STEP_LIMIT_S + 5)
                except StaleHandleError:
                    self.matrices.pop(key, None)
                except AlchemistError:
                    continue
                break

    def new(self, user: str, value: np.ndarray[Any, Any], step: str, *arguments: Any) -> None:
        self.world.keys += 1
        key = self.world.keys
        value = values(key) if step in ("send", "stream") else value
        self.ask(user, step, key, *arguments)
        named = step == "send" and bool(arguments[-1])
        self.matrices[key] = Model(value, named, {user})

    @step(
        user=st.sampled_from(USERS),
        layout=st.sampled_from(("VC_STAR", "MC_MR", "STAR_STAR", "CIRC_CIRC")),
        named=st.booleans(),
    )
    def send(self, user: str, layout: str, named: bool) -> None:
        self.new(user, np.empty(0), "send", layout, named)

    @step(user=st.sampled_from(USERS))
    def stream(self, user: str) -> None:
        self.new(user, np.empty(0), "stream")

    @step(choose=CHOICES)
    def change_while_threads_fetch(self, choose: random.Random) -> None:
        key, user = self.choice(choose)
        self.ask(user, "watched_change", key, 0.5)
        model = self.matrices[key]
        model.value = model.value + 0.5
        np.testing.assert_allclose(self.ask(user, "fetch", key), model.value, rtol=1e-9)

    @step()
    def restore(self) -> None:
        """A checkpoint has what was done to each matrix."""
        found = self.ask("owner", "restored", str(self.world.folder / "elsewhere"))
        for key, model in self.matrices.items():
            if model.named and f"m{key}" in found:  # else it was lost; see `LOST`
                np.testing.assert_allclose(found[f"m{key}"], model.value, rtol=1e-9)

    @step(choose=CHOICES, step=st.sampled_from(("double", "gram")))
    def compute(self, choose: random.Random, step: str) -> None:
        key, user = self.choice(choose)
        X = self.matrices[key].value
        self.new(user, X * 2.0 if step == "double" else X.T @ X, step, key)

    @step(choose=CHOICES, step=st.sampled_from(("change", "assign")))
    def change(self, choose: random.Random, step: str) -> None:
        key, user = self.choice(choose)
        self.ask(user, step, key, 0.5)
        X = self.matrices[key].value.copy()
        if step == "change":
            X += 0.5
        else:
            X[0] = 0.5
        self.matrices[key].value = X

    @step(choose=CHOICES)
    def compare(self, choose: random.Random) -> None:
        key, user = self.choice(choose)
        np.testing.assert_allclose(
            self.ask(user, "fetch", key), self.matrices[key].value, rtol=1e-9
        )

    @step(choose=CHOICES, cut_after_s=st.sampled_from((None, 0.0, 0.002)))
    def read_while_another_writes(self, choose: random.Random, cut_after_s: float | None) -> None:
        """A fetch sees all of a change, or nothing of it; also over a link that breaks."""
        keys = [key for key, model in self.matrices.items() if len(model.holders) > 1]
        if not keys:
            return
        key = choose.choice(keys)
        model = self.matrices[key]
        reader, writer = choose.sample(sorted(model.holders), 2)
        if "thin" in (reader, writer) and cut_after_s is not None:
            reader, writer = "thin", next(iter(model.holders - {"thin"}))
            self.later(cut_after_s, self.world.link.cut)
        reading = self.world.users[reader].begin("fetch", key)
        self.ask(writer, "change", key, 0.5)
        before, model.value = model.value, model.value + 0.5
        try:
            found = reading.result(STEP_LIMIT_S + 5)
        except (*REPEAT, GroupFailedError, SessionError, StaleHandleError):
            found = self.ask(reader, "fetch", key)
        assert np.allclose(found, before, rtol=1e-9) or np.allclose(
            found, model.value, rtol=1e-9
        ), "a torn read"

    @step(choose=CHOICES)
    def take(self, choose: random.Random) -> None:
        keys = [key for key, model in self.matrices.items() if model.named]
        if not keys:
            return
        key, user = choose.choice(keys), choose.choice(USERS)
        self.ask(user, "take", key)
        self.matrices[key].holders.add(user)

    @step(choose=CHOICES)
    def drop(self, choose: random.Random) -> None:
        key, user = self.choice(choose)
        self.forget(key, user)

    def forget(self, key: int, user: str) -> None:
        model = self.matrices[key]
        if model.named and model.holders == {user}:  # a name holds a matrix
            if refused := self.ask(user, "free", key):
                assert self.processes_lost, f"{refused}; {user} of {self.world.pids()}"
                self.world.named.add(key)
        else:
            self.ask(user, "drop", key)
        model.holders.discard(user)
        if not model.holders:
            del self.matrices[key]

    @step(
        choose=CHOICES,
        user=st.sampled_from(USERS),
        step=st.sampled_from(("failing_call", "late_call", "disconnect")),
    )
    def trouble(self, choose: random.Random, user: str, step: str) -> None:
        if user == "thin" and step == "disconnect":
            self.world.link.plugged = False
            self.world.link.cut()
            self.later(choose.choice((0.0, 0.3, 1.0)), self.world.link.plug)
        else:
            self.ask(user, step)

    @step(user=st.sampled_from(USERS), nbytes=st.integers(1, 300_000))
    def payload(self, user: str, nbytes: int) -> None:
        self.ask(user, "payload", nbytes)

    @step(what=st.sampled_from(("blocks", "task", "private_session")), rows=st.integers(1, 500))
    def with_ray(self, what: str, rows: int) -> None:
        self.ask("owner", what, rows)

    @step(choose=CHOICES)
    def drop_a_call(self, choose: random.Random) -> None:
        key, user = self.choice(choose)
        if user != "thin":
            self.ask(user, "dropped_call", key)

    # --- faults ---

    @step(
        choose=CHOICES,
        part=st.sampled_from(
            ("rank", "rank", "rank", "proxy", "data endpoint",
             "agent", "fork-server", "process", "manager")
        ),
        after_s=st.sampled_from((0.0, 0.005, 0.05)),
    )  # fmt: skip
    def kill(self, choose: random.Random, part: str, after_s: float) -> None:
        # Starting another process takes seconds.
        if choose.random() < (0.9 if part in ("process", "manager") else 0.7):
            return
        self.world.done[f"killed: {part}"] += 1
        self.world.trail.append(f"kill {part} after {after_s} s")
        if part == "process":
            self.replace_process(choose.choice(("attached", "thin")))
        elif part == "manager":
            self.killed_manager = True
            actor = ray.get_actor(group_name(NAME), namespace=NAMESPACE)
            os.kill(pid_of(actor), signal.SIGKILL)
            self.ask("owner", "ids")
            raise AssertionError("the gang answers without its GroupManager")
        elif part in ("agent", "fork-server"):
            with contextlib.suppress(ProcessLookupError):  # it is still going from the kill before
                os.kill(agent_pids()[part], signal.SIGKILL)
        else:
            ranks = self.ask("owner", "ranks")
            self.later(after_s, lambda: os.kill(self.part(part, ranks, choose), signal.SIGKILL))

    def part(self, part: str, ranks: list[int], choose: random.Random) -> int:
        """The process id of a rank, of the proxy of all, or of its other child."""
        if part == "rank":
            return choose.choice(ranks)
        proxy = traces.parent_of(ranks[0])
        others = descendants([proxy]) - set(ranks)
        return proxy if part == "proxy" else min(others, default=proxy)

    def replace_process(self, user: str) -> None:
        self.processes_lost = True
        self.world.users[user].end()
        for key, model in list(self.matrices.items()):
            model.holders.discard(user)
            if not model.holders:
                del self.matrices[key]
                if model.named:  # it stays without holders
                    self.world.named.add(key)
        self.world.replace(user)

    @step(
        choose=CHOICES,
        workers=st.integers(1, MAX_WORKERS),
        stop_after_s=st.sampled_from((None, 0.0, 0.05, 0.15)),
    )
    def resize(self, choose: random.Random, workers: int, stop_after_s: float | None) -> None:
        if choose.random() < 0.7:
            return
        if stop_after_s is not None:
            manager = self.world.users["owner"].als.connection.transport.manager
            self.later(stop_after_s, manager.stop_resize)
        try:
            self.ask("owner", "resize", workers)
            self.world.done["resized"] += 1
        except (GroupError, CancelledError) as error:  # ranks were lost, or it was stopped
            if "was not resized and goes on" not in str(error):
                raise

    # --- the rest ---

    def choice(self, choose: random.Random) -> tuple[int, str]:
        if not self.matrices:
            raise _Skip
        key = choose.choice(sorted(self.matrices))
        return key, choose.choice(sorted(self.matrices[key].holders))

    def later(self, after_s: float, cause: Callable[[], None]) -> None:
        def caused() -> None:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, SessionError):
                # Another kill, or a resize, was quicker.
                cause()

        timer = threading.Timer(after_s, caused)
        self.timers.append(timer)
        timer.start()

    def teardown(self) -> None:
        """All matrices are as the model says; after all have dropped them, none is left."""
        for timer in self.timers:
            timer.join()
        guarded(self, self.finish)

    def finish(self) -> None:
        while self.matrices:
            with contextlib.suppress(_Skip):
                key = min(self.matrices)
                model = self.matrices[key]
                for user in sorted(model.holders):
                    np.testing.assert_allclose(self.ask(user, "fetch", key), model.value, rtol=1e-9)
                    self.forget(key, user)
        left: set[int] = set()

        def freed() -> bool:
            left.clear()
            with contextlib.suppress(_Skip):
                left.update(set(self.ask("owner", "ids")) - self.world.lingering)
            return not left

        if self.processes_lost:  # their leases end later: see the test
            freed()
            self.world.lingering |= left
        else:
            assert traces.wait_until(freed, FREED_LIMIT_S, 0.02) is not None, f"not freed: {left}"
