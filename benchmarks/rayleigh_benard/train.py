"""Trains a policy to control convection: RLlib's PPO, one policy for the heaters of every cell.

    python -m benchmarks.rayleigh_benard.train --minutes 3

prints the progress, then the Nusselt numbers of the best policy, of no control and of P-control on
the same episodes. ``out/`` gets a checkpoint, the learning curve, a strip and a film of an episode.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.cluster.ray_cluster import check
from alchemist_ray.plural import counted
from benchmarks.rayleigh_benard.baselines import (
    HEATERS,
    NO_CONTROL,
    P_CONTROL,
    SEEDS,
    agent_views,
    mean_nusselt,
    play,
)
from benchmarks.rayleigh_benard.curves import Curve

REFERENCE = 4.90  # for rewards: the Nusselt number without control
EPISODE = 200
VALIDATION_SEEDS = (11, 12)  # of the episodes that select the best policy
VALIDATE_EVERY_S = 12.0
FIRST_LOG_STD = -0.7  # initial exploration of half the range of a heater
STEPS_PER_ITERATION = 200  # control steps, of all cells
LIBRARY = {"lib_name": "rayleigh_benard"}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the training."""

    minutes: float = 3.0
    out: Path = Path("out/rayleigh_benard")
    seed: int = 0
    gangs: int = 2
    workers: int = 1
    copies: int = 1
    address: str | None = None


class HeaterPolicy:
    """The shared policy without exploration, for an observation of the whole cell.

    Parameters
    ----------
    module : RLModule
        From an agent's observation (144,) to its action (1,).
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, observation: NDArray[Any]) -> NDArray[np.float32]:
        """From (144,), the cell, to (12,), its heaters, each with its own view of the cell."""
        import torch

        seen = torch.from_numpy(agent_views(observation))
        with torch.no_grad():
            told = self._module.forward_inference({"obs": seen})
        means = told["action_dist_inputs"][:, 0].numpy()
        return np.asarray(np.clip(means, -1.0, 1.0), np.float32)


def ppo(options: Options) -> Any:
    """Build the algorithm, which starts the gangs."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    from envs import HPCSimulatorVectorEnv
    from envs.rllib import configure

    config: Any = configure(
        PPOConfig(),
        HPCSimulatorVectorEnv,
        env_config={
            **LIBRARY,
            "num_workers": options.workers,
            "copies": options.copies,
            "sim": {"agents": HEATERS, "reference": REFERENCE},
        },
        num_env_runners=options.gangs,
        num_envs_per_env_runner=HEATERS * options.copies,
    )
    config.training(
        train_batch_size_per_learner=HEATERS * STEPS_PER_ITERATION,
        minibatch_size=600,
        num_epochs=8,
        lr=1e-3,
        gamma=0.97,
        lambda_=0.9,
        entropy_coeff=0.0,
        vf_clip_param=1e3,
        grad_clip=0.5,
    )
    config.learners(num_learners=0)
    config.rl_module(
        model_config=DefaultModelConfig(
            fcnet_hiddens=[64, 64],
            fcnet_activation="tanh",
            vf_share_layers=False,
            free_log_std=True,
        )
    )
    config.debugging(seed=options.seed, log_level="ERROR")
    algorithm = config.build_algo()
    algorithm.learner_group.foreach_learner(_reduce_exploration)
    algorithm.env_runner_group.sync_weights(
        from_worker_or_learner_group=algorithm.learner_group, inference_only=True
    )
    return algorithm


def _reduce_exploration(learner: Any) -> None:
    """Reduce the initial exploration: RLlib's standard deviation of 1 is the range of actions."""
    import torch

    for _, module in learner.module.items():
        for name, parameter in module.named_parameters():
            if name.endswith("log_std"):
                with torch.no_grad():
                    parameter.fill_(FIRST_LOG_STD)


def learn(options: Options, env: Any, curve: Curve) -> tuple[HeaterPolicy, HeaterPolicy]:
    """Train for the given time; return the untrained and the best policy.

    The time includes validation, but not building the algorithm.
    """
    started = time.monotonic()
    algorithm = ppo(options)
    print(
        f"{counted(options.gangs, 'gang')} ready after {time.monotonic() - started:.0f} s",
        flush=True,
    )
    untrained = copy.deepcopy(algorithm.get_module())
    best = untrained
    started, validated = time.monotonic(), 0.0
    steps, spent = 0, 0.0
    try:
        while spent < 60 * options.minutes:
            told = algorithm.train().get("env_runners", {})
            spent = time.monotonic() - started
            steps = int(told.get("num_env_steps_sampled_lifetime", 0)) // HEATERS
            mean_return = float(told.get("episode_return_mean", float("nan")))
            if np.isfinite(mean_return):
                curve.training.append((spent, steps, REFERENCE - mean_return / EPISODE))
            last = spent >= 60 * options.minutes
            if spent - validated >= VALIDATE_EVERY_S or last:
                module = algorithm.get_module()
                nusselt = mean_nusselt(env, HeaterPolicy(module), VALIDATION_SEEDS)
                if nusselt < curve.best:
                    best = copy.deepcopy(module)
                    algorithm.save_to_path(str((options.out / "checkpoint").absolute()))
                spent = validated = time.monotonic() - started
                curve.validation.append((spent, steps, nusselt))
                exploring = curve.training[-1][2] if curve.training else float("nan")
                print(
                    f"{spent:5.0f} s  {steps:7d} steps  Nu {nusselt:.3f} "
                    f"(best {curve.best:.3f}; {exploring:.3f} with exploration)",
                    flush=True,
                )
    finally:
        algorithm.stop()
    return HeaterPolicy(untrained), HeaterPolicy(best)


def train(options: Options) -> dict[str, float]:
    """Train, compare with the baselines, draw; return the table of results.

    Raises
    ------
    ImportError
        Where RLlib or torch is missing.
    ResourceError, AlchemistError
        If the gangs cannot be started.
    """
    from benchmarks.rayleigh_benard.render import save_gif, save_strip
    from envs import HPCSimulatorEnv

    options.out.mkdir(parents=True, exist_ok=True)
    curve = Curve()
    sim = {"reference": REFERENCE}
    with HPCSimulatorEnv({**LIBRARY, "num_workers": 1, "sim": sim}) as env:
        for name, baseline in (("no control", NO_CONTROL), ("P-control", P_CONTROL)):
            curve.baselines[name] = mean_nusselt(env, baseline, SEEDS)
            print(f"{name}: Nu {curve.baselines[name]:.3f}", flush=True)
        untrained, policy = learn(options, env, curve)
        table = {**curve.baselines, "PPO": mean_nusselt(env, policy, SEEDS)}
        episodes = {
            name: play(env, chosen, SEEDS[0], fields=True)
            for name, chosen in (("before", untrained), ("after", policy))
        }
    load = os.getloadavg()[0]
    curve.save(options.out / "curve.json", result=table, seed=options.seed, load=load)
    title = f"PPO on {counted(options.gangs, 'gang')} of {options.workers}: Nu {table['PPO']:.3f}"
    curve.draw(options.out / "curve.png", title)
    save_strip({"before training": episodes["before"], "after": episodes["after"]},
               options.out / "strip.png", moments=(0, 30, 60, 200))  # fmt: skip
    save_gif(episodes["after"], options.out / "after.gif", title="after training", every=8)
    return table


def start_ray(options: Options) -> None:
    """Start Ray with room for the gangs, or join the cluster at an address."""
    import ray

    quiet = {"RAY_DISABLE_IMPORT_WARNING": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    if options.address is not None:
        if options.address != "auto":
            check(options.address, f"--address {options.address}")
        ray.init(address=options.address, logging_level=logging.ERROR)
    elif not ray.is_initialized():
        needed = options.gangs * (1 + options.workers) + 1
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, needed),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": quiet},
        )


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, train, print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rayleigh_benard.train",
        description="Train a policy, and compare it with no control and proportional control.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = Options()
    parser.add_argument(
        "--minutes", type=float, default=defaults.minutes, help="minutes of training"
    )
    parser.add_argument("--out", type=Path, default=defaults.out, help="output folder")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of training")
    parser.add_argument(
        "--gangs", type=int, default=defaults.gangs, help="env runners, each with a gang"
    )
    parser.add_argument("--workers", type=int, default=defaults.workers, help="ranks of a gang")
    parser.add_argument(
        "--copies", type=int, default=defaults.copies, help="simulated cells per gang"
    )
    parser.add_argument("--address", default=None, help="Ray cluster to join; None: start one")
    options = Options(**vars(parser.parse_args(argv)))
    try:
        import ray
        import torch
        from ray import rllib  # noqa: F401
    except ImportError as error:
        print(f"training needs RLlib ({error}): pip install 'alchemist-on-ray[rllib]'")
        return 2
    warnings.filterwarnings("ignore", module=r"(ray|gymnasium)\b")
    logging.getLogger("ray").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    start_ray(options)
    try:
        table = train(options)
    finally:
        ray.shutdown()
    print(f"\n| policy | Nusselt number, {len(SEEDS)} episodes |\n|---|---|")
    for name, nusselt in table.items():
        print(f"| {name} | {nusselt:.3f} |")
    made = ", ".join(sorted(path.name for path in options.out.iterdir()))
    print(f"\nin {options.out}: {made}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
