"""States of copies, planning by look-ahead, and environments that step at the same time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import RecordVideo

from alchemist_ray.errors import NoSuchRoutineError
from envs import EnvError, GangLostError
from tests.envs.test_faults import pids
from tests.support.traces import within

ACTION = np.array([0.25])

Make = Callable[..., Any]


# --- states ---


@pytest.mark.parametrize(("workers", "gangs"), [(1, 1), (2, 1), (3, 1), (1, 2)])
def test_a_state_of_a_copy_goes_to_any_other(
    make: Make, make_vector: Make, workers: int, gangs: int
) -> None:
    env = make_vector(copies=2, num_workers=workers, gangs=gangs)
    env.reset(seed=1)
    actions = np.array([[0.5], [-0.5]])
    env.step(actions)
    states = [env.save_state(copy) for copy in range(2)]
    assert states[0].shape == (1, 3)
    expected = env.step(actions)[0]
    env.load_state(states[1], 0)
    env.load_state(states[0], 1)
    swapped = env.step(actions[::-1])[0]
    np.testing.assert_array_equal(swapped, expected[::-1])
    with pytest.raises(EnvError, match="copies are numbered 0 to 1"):
        env.save_state(2)
    single = make(num_workers=2)
    single.reset()
    for _ in range(2):
        single.load_state(states[0])
        np.testing.assert_allclose(single.step(actions[0])[0], expected[0], rtol=1e-6)


def test_look_ahead_over_copies_finds_the_best_action(make: Make, make_vector: Make) -> None:
    """The example of docs/environments.md: one environment, and copies that try actions."""
    candidates = np.linspace(-1, 1, 5)[:, None]
    env, planner = make(), make_vector(copies=5)
    env.reset(seed=3), planner.reset(seed=3)
    total = 0.0
    for _ in range(4):
        state = env.save_state()
        for copy in range(5):
            planner.load_state(state, copy)
        rewards = planner.step(candidates)[1]
        _, reward, *_ = env.step(candidates[rewards.argmax()])
        assert reward == rewards.max()
        total += reward
    held = make()
    held.reset(seed=3)
    assert total >= sum(held.step([0.0])[1] for _ in range(4))


def test_a_simulator_without_states_says_so(make_vector: Make, cluster: str) -> None:
    from envs import HPCSimulatorVectorEnv  # noqa: PLC0415

    path = str(Path(__file__).with_name("oscillator.py"))
    with HPCSimulatorVectorEnv(lib_name="oscillator", lib_path=path, copies=2) as env:
        env.reset(seed=1)
        with pytest.raises(NoSuchRoutineError, match="save_state"):
            env.save_state(1)
        assert env.reset(seed=1)[0].shape == (2, 2)


# --- several environments at once ---


def test_environments_step_at_the_same_time(make: Make) -> None:
    envs = [make({"sleep_s": 1.0}) for _ in range(4)]
    for env in envs:
        env.reset(seed=5)
    with within(3.5):  # one after another: 4
        for env in envs:
            env.step_async(ACTION)
        results = [env.step_wait() for env in envs]
    for result in results[1:]:
        np.testing.assert_array_equal(result[0], results[0][0])
    alone = make()
    alone.reset(seed=5)
    np.testing.assert_array_equal(alone.step(ACTION)[0], results[0][0])


def test_a_step_in_progress_is_waited_for_and_its_error_comes_from_the_wait(
    make: Make, make_vector: Make
) -> None:
    def waits(env: Any, action: Any) -> None:
        with pytest.raises(EnvError, match="step_async"):
            env.step_wait()
        env.reset(seed=1)
        env.step_async(action)
        for call in (
            lambda: env.step(action), lambda: env.step_async(action), env.reset,
            env.save_state, lambda: env.load_state(np.zeros((1, 3))), env.field,
        ):  # fmt: skip
            with pytest.raises(EnvError, match="step_wait"):
                call()
        env.step_wait()
        os.kill(pids(env)[0], signal.SIGKILL)
        env.step_async(action)
        with pytest.raises(GangLostError):
            env.step_wait()
        env.reset(seed=1)
        assert env.step(action)[0].shape

    waits(make(), ACTION)
    waits(make_vector(copies=2), np.zeros((2, 1)))


@pytest.mark.parametrize(
    ("kind", "at_once"),
    [(KeyboardInterrupt, True), (KeyboardInterrupt, False), (TimeoutError, False)],
)
def test_a_wait_that_is_interrupted_or_closed_ends_its_step(
    make: Make, kind: type[BaseException], at_once: bool
) -> None:
    """The wait of `step`, which is `at_once`, or of `step_wait`; Ctrl-C is SIGINT."""

    def interrupt(*_: object) -> None:
        raise kind

    env = make({"hang_at": 2}, num_workers=2, step_timeout_s=30.0)
    env.reset(seed=1)
    env.step(ACTION)
    ranks = pids(env)
    if not at_once:
        env.step_async(ACTION)
    number = signal.SIGINT if at_once else signal.SIGUSR2
    before = signal.getsignal(number) if at_once else signal.signal(number, interrupt)
    me = threading.main_thread().ident
    assert me is not None
    threading.Timer(0.5, signal.pthread_kill, (me, number)).start()
    with within(2.5 if at_once else 5.0):
        with pytest.raises(kind):
            env.step(ACTION) if at_once else env.step_wait()
        signal.signal(number, before)
    env.reset(seed=1)
    env.step(ACTION)
    assert pids(env) == ranks
    other = make({"hang_at": 1}, step_timeout_s=30.0)
    other.reset(seed=1)
    other.step_async(ACTION)
    with within(10.0):
        other.close()


# --- video ---


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # moviepy's own
def test_gymnasium_records_a_video(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("moviepy", reason="needs moviepy: pip install 'alchemist-on-ray[envs]'")
    env = RecordVideo(
        make({"length": 3, "size": 16}, render_mode="rgb_array"), str(tmp_path / "video"),
        episode_trigger=lambda _: True,
    )  # fmt: skip
    env.reset(seed=1)
    for _ in range(3):
        env.step(ACTION)
    env.reset()
    (video,) = tmp_path.glob("video/*.mp4")
    assert video.stat().st_size > 500
    env.close()
