"""Faults under an environment: reported in time, nothing left, and the next reset works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="needs gymnasium: pip install 'alchemist-on-ray[envs]'")

from alchemist_ray.errors import GroupRecoveredError
from envs import (
    EnvError,
    GangLostError,
    HPCSimulatorEnv,
    HPCSimulatorVectorEnv,
    RestartLimitError,
    SimulationError,
    StepTimeoutError,
)
from tests.support import traces

PENDULUM = Path(__file__).with_name("pendulum.py")
NEWS_S = 2.0
RESTART_S = 3.0
ACTION = [0.1]


def new(kind: Any = HPCSimulatorEnv, sim: dict[str, Any] | None = None, **config: Any) -> Any:
    return kind(lib_name="pendulum", lib_path=PENDULUM, sim=sim or {}, **config)


def pids(env: Any) -> list[int]:
    """The ranks of an environment's gang."""
    (simulation,) = simulations(env)
    return pids_of(simulation)


def pids_of(simulation: Any) -> list[int]:
    return [worker.pid for worker in simulation._session.list_workers()]


def simulations(env: Any) -> list[Any]:
    """The gangs of an environment."""
    return getattr(env._simulation, "_parts", [env._simulation])


def gone(ranks: list[int]) -> bool:
    return traces.wait_until(lambda: not any(map(traces.alive, ranks)), NEWS_S) is not None


def told_of(error: type[Exception], work: Callable[[], Any]) -> tuple[Any, float]:
    """The error, and how long it took to come."""
    start = time.monotonic()
    with pytest.raises(error) as caught:
        work()
    return caught.value, time.monotonic() - start


@pytest.fixture
def bystander(cluster: str) -> Iterator[HPCSimulatorEnv]:
    """Another environment, which must not notice."""
    with new() as env:
        env.reset(seed=1)
        first = env.step(ACTION)[0].tolist()
        before = pids(env)
        yield env
        env.reset(seed=1)
        assert env.step(ACTION)[0].tolist() == first
        assert pids(env) == before


@pytest.mark.parametrize(
    ("fault", "rank"), [("hang_at", 0), ("hang_at", 1), ("native_hang_at", -1)]
)
def test_a_step_that_hangs_is_ended_with_its_gang(
    bystander: HPCSimulatorEnv, fault: str, rank: int
) -> None:
    with new(sim={fault: 2, "on_rank": rank}, num_workers=2, step_timeout_s=1.0) as env:
        env.reset(seed=1)
        env.step(ACTION)
        ranks = pids(env)
        error, seconds = told_of(StepTimeoutError, lambda: env.step(ACTION))
        assert 1.0 <= seconds < 1.0 + NEWS_S
        assert isinstance(error, GangLostError | TimeoutError)
        assert "step of simulator 'pendulum'" in str(error)
        assert "step_timeout_s" in str(error)
        assert gone(ranks)
        with pytest.raises(EnvError, match="reset"):
            env.step(ACTION)
        with traces.within(RESTART_S):
            env.reset(seed=1)
        env.step(ACTION)
        assert pids(env) != ranks


def test_ranks_that_do_not_leave_a_failed_step_are_replaced_by_the_next_reset(
    bystander: HPCSimulatorEnv,
) -> None:
    sim = {"raise_at": 2, "native_others_at": 2, "on_rank": 1}
    with new(sim=sim, num_workers=2) as env:
        first = env.reset(seed=1)[0].tolist()
        env.step(ACTION)
        ranks = pids(env)
        told_of(SimulationError, lambda: env.step(ACTION))
        with traces.within(NEWS_S + RESTART_S):
            assert env.reset(seed=1)[0].tolist() == first
        env.step(ACTION)
        assert gone(ranks)


def test_ctrl_c_while_a_rank_stays_in_native_code_is_followed_by_another_gang(
    bystander: HPCSimulatorEnv,
) -> None:
    sim = {"deaf_at": 2, "on_rank": 1}
    with new(sim=sim, num_workers=2, step_timeout_s=60.0) as env:
        env.reset(seed=1)
        env.step(ACTION)
        ranks = pids(env)
        me = threading.main_thread().ident
        assert me is not None
        threading.Timer(0.5, signal.pthread_kill, (me, signal.SIGINT)).start()
        told_of(KeyboardInterrupt, lambda: env.step(ACTION))
        with traces.within(NEWS_S + RESTART_S):
            env.reset(seed=1)
        env.step(ACTION)
        assert gone(ranks)


def test_a_reset_that_hangs_is_ended_too(bystander: HPCSimulatorEnv) -> None:
    with new(num_workers=2, step_timeout_s=1.0) as env:
        env.reset()
        ranks = pids(env)
        os.kill(ranks[1], signal.SIGSTOP)  # the other waits for it in the first step
        told_of(StepTimeoutError, lambda: (env.reset(), env.step(ACTION)))
        assert gone(ranks)
        env.reset()


@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_a_killed_rank_is_told_at_once_and_the_next_reset_is_quick(
    bystander: HPCSimulatorEnv, when: str
) -> None:
    sim = {"hang_at": 2, "on_rank": 1} if when == "in a step" else {}
    with new(sim=sim, num_workers=3) as env:
        first = env.reset(seed=4)[0].tolist()
        env.step(ACTION)
        ranks = pids(env)
        if when == "in a step":
            timer = threading.Timer(0.5, os.kill, (ranks[2], signal.SIGKILL))
            timer.start()
            error, seconds = told_of(GangLostError, lambda: env.step(ACTION))
            timer.join()
            assert seconds < 0.5 + NEWS_S
        else:
            os.kill(ranks[2], signal.SIGKILL)
            error, seconds = told_of(GangLostError, lambda: [env.step(ACTION) for _ in range(9)])
            assert seconds < NEWS_S
        assert isinstance(error.__cause__, GroupRecoveredError)
        assert "rank 2" in str(error)
        assert str(error).count("reset() begins the next one") == 1
        assert "SIGKILL" in str(error)
        assert gone(ranks)
        with traces.within(RESTART_S):
            assert env.reset(seed=4)[0].tolist() == first
        env.step(ACTION)


def test_an_exit_in_a_step_shows_its_code(bystander: HPCSimulatorEnv) -> None:
    with new(sim={"exit_at": 1, "on_rank": 0}, num_workers=2) as env:
        env.reset()
        error, _ = told_of(GangLostError, lambda: env.step(ACTION))
        assert "code 7" in str(error)


def test_a_vector_environment_goes_on_with_a_fresh_gang(bystander: HPCSimulatorEnv) -> None:
    with new(HPCSimulatorVectorEnv, copies=3, num_workers=2, step_timeout_s=1.0) as env:
        first = env.reset(seed=2)[0].tolist()
        actions = [[0.1]] * 3
        env.step(actions)
        ranks = pids(env)
        os.kill(ranks[1], signal.SIGKILL)
        told_of(GangLostError, lambda: [env.step(actions) for _ in range(9)])
        assert env.reset(seed=2)[0].tolist() == first
        os.kill(pids(env)[0], signal.SIGSTOP)
        told_of(StepTimeoutError, lambda: env.step(actions))
        assert env.reset(seed=2)[0].tolist() == first


def test_restarts_are_capped(cluster: str) -> None:
    with new(sim={"exit_at": 1}, max_restarts=2) as env:
        for _ in range(3):
            env.reset()
            told_of(GangLostError, lambda: env.step(ACTION))
        error, _ = told_of(RestartLimitError, env.reset)
        assert "3 times" in str(error)
        assert "max_restarts is 2" in str(error)


def test_losses_count_for_the_environment_that_replaces_a_closed_one(cluster: str) -> None:
    def lose(env: HPCSimulatorEnv) -> dict[str, int]:
        info = env.reset()[1]
        told_of(GangLostError, lambda: env.step(ACTION))
        return info

    with new(sim={"exit_at": 1}, max_restarts=1) as other:
        with new(sim={"exit_at": 1}, max_restarts=1) as first:
            assert lose(first) == {}
        with new(sim={"exit_at": 1}, max_restarts=1) as second:
            assert lose(second) == {"gang_restarts": 1, "step_timeouts": 0, "dropped_steps": 0}
        with new(sim={"exit_at": 1}, max_restarts=1) as third:
            told_of(RestartLimitError, third.reset)
        assert lose(other) == {}  # it has lost nothing before


def test_the_group_manager_of_an_environment_dies(bystander: HPCSimulatorEnv) -> None:
    with new(num_workers=2) as env:
        env.reset()
        ranks = pids(env)
        env._simulation._session._gangs._own.give_up()
        told_of(GangLostError, lambda: [(env.step(ACTION), time.sleep(0.1)) for _ in range(20)])
        assert gone(ranks)
        env.reset()
        env.step(ACTION)


def test_a_simulation_that_does_not_set_up_in_time(cluster: str, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    text = PENDULUM.read_text()
    slow.write_text(text.replace("given = json.loads(config)", "time.sleep(60)", 1))
    with traces.within(5 + 3 * NEWS_S), pytest.raises(StepTimeoutError, match="start_timeout_s"):
        HPCSimulatorEnv(lib_name="slow", lib_path=slow, start_timeout_s=5)
