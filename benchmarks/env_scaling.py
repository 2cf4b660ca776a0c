"""Weak scaling of environments: a step that sleeps, so that two cores suffice for many gangs.

``python -m benchmarks.env_scaling`` starts a Ray with 40 CPUs for it, and takes 3 minutes on 2 free
cores; `make bench` leaves it out.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.env_step import built
from benchmarks.harness import Report, alone, timed
from benchmarks.simulated_env import SimulatedGangs
from envs import HPCSimulatorEnv, HPCSimulatorVectorEnv, simulation

GANGS = (1, 2, 4, 8, 16)
SIMULATED = (1, 16, 64, 256)
STEP_S = 0.2
STEPS = 10
TURNS = 3
TOGETHER = 8


def run() -> Report:
    report = Report("env_scaling")
    with tempfile.TemporaryDirectory() as folder:
        idle = built(Path(folder))
        _together(report, idle)
        with contextlib.suppress(ImportError):
            _rllib(report, idle)
        _one_process(report, idle)
    _simulated(report)
    return report


def _together(report: Report, idle: str) -> None:
    """Eight environments of one process, from their constructors to the end of their resets."""
    config = {"lib_name": "idle", "lib_path": idle}
    found = {"vector": float("inf"), "single": float("inf")}
    for _ in range(TURNS):
        with HPCSimulatorVectorEnv(config, copies=TOGETHER, gangs=TOGETHER) as many:
            found["vector"] = min(found["vector"], timed(many.reset))
        envs = [HPCSimulatorEnv(config) for _ in range(TOGETHER)]
        found["single"] = min(found["single"], timed(lambda envs=envs: [e.reset() for e in envs]))
        for env in envs:
            env.close()
    report.add(
        f"{TOGETHER} gangs of a vector environment start", found["vector"], 2.0, "s", at_most=True,
        detail=f"at the same time; {TOGETHER} single environments, one after another: "
        f"{found['single']:.1f} s. Best of {TURNS} turns",
    )  # fmt: skip


def _rllib(report: Report, idle: str) -> None:
    """Env runners with a gang each: steps in a second for one and for many."""
    from ray.rllib.algorithms.ppo import PPOConfig

    from envs.rllib import configure

    config = PPOConfig()
    config.learners(num_learners=0)
    env_config = {"lib_name": "idle", "lib_path": idle, "sim": {"sleep_us": int(1e6 * STEP_S)}}
    configure(config, HPCSimulatorEnv, env_config=env_config, num_env_runners=max(GANGS))
    algorithm = config.build_algo()
    group: Any = algorithm.env_runner_group

    def sample(gangs: int, steps: int) -> None:
        group.foreach_env_runner(
            lambda runner: len(runner.sample(num_timesteps=steps)),
            remote_worker_ids=group.healthy_worker_ids()[:gangs],
            local_env_runner=False,
        )

    sample(max(GANGS), 2)  # starts the gangs; those that do not sample sleep
    rates = {
        gangs: gangs * STEPS / min(timed(lambda n=gangs: sample(n, STEPS)) for _ in range(TURNS))
        for gangs in GANGS
    }
    algorithm.stop()
    _rows(report, "RLlib: env runners with a gang each", rates)


def _one_process(report: Report, idle: str) -> None:
    """A vector environment with many gangs."""
    rates = {}
    sim = {"sleep_us": int(1e6 * STEP_S)}
    for gangs in GANGS:
        with HPCSimulatorVectorEnv(
            lib_name="idle", lib_path=idle, sim=sim, copies=gangs, gangs=gangs
        ) as env:
            rates[gangs] = _rate(env, gangs)
    _rows(report, "a vector environment with several gangs", rates)


def _rate(env: HPCSimulatorVectorEnv, gangs: int) -> float:
    env.reset(seed=0)
    actions = np.zeros((gangs, 4))
    env.step(actions)
    return gangs / float(np.median([timed(lambda: env.step(actions)) for _ in range(STEPS)]))


@contextlib.contextmanager
def _no_sessions(gangs: SimulatedGangs) -> Iterator[None]:
    kept = simulation.open_session, simulation.release_dropped
    simulation.open_session = gangs.open_session
    simulation.release_dropped = lambda *_: None
    try:
        yield
    finally:
        simulation.open_session, simulation.release_dropped = kept


def _simulated(report: Report) -> None:
    """The same with connections to one process that answers for all ranks."""
    rates = {}
    gangs = SimulatedGangs(STEP_S)
    with _no_sessions(gangs):
        for count in SIMULATED:
            with HPCSimulatorVectorEnv(lib_name="simulated", copies=count, gangs=count) as env:
                rates[count] = _rate(env, count)
    gangs.close()
    _rows(report, "a vector environment with simulated gangs", rates)


def _rows(report: Report, what: str, rates: dict[int, float]) -> None:
    one, most = rates[min(rates)], max(rates)
    each = ", ".join(f"{n}: {rate / one / n:.2f}" for n, rate in rates.items())
    report.add(
        f"{what}: efficiency of {most} for 1", rates[most] / one / most, 0.9, "of the ideal",
        detail=f"a step sleeps {STEP_S:g} s; {each}; {rates[most]:.0f} steps/s",
    )  # fmt: skip


if __name__ == "__main__":
    alone(run, cpus=40)
