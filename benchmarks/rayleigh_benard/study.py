"""Compares methods of control over several seeds; every run is resumed where it was stopped.

    python -m benchmarks.rayleigh_benard.study --rayleigh 8e4 --seeds 5 --steps 20000

trains Stable-Baselines3's PPO and SAC with one policy for the cell, and PPO with a policy that the
heaters share (``ppo-agents``), and tests the best policy of each run, P-control and no control on
the same 50 episodes. ``--report`` prints the table of the results and draws the learning curves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import markdown, save_figure, start_ray
from benchmarks.rayleigh_benard.baselines import (
    HEATERS,
    POLICIES,
    Policy,
    ProportionalControl,
    agent_views,
    mean_nusselt,
    play,
)

METHODS = ("ppo-agents", "ppo", "sac")
# Nodes for a Rayleigh number; the default cell is 96 x 31.
CELLS: dict[float, dict[str, int]] = {3.2e5: {"height": 47, "width": 144}}
# Of P-control, velocity and temperature: the best of `gains`; at 8e4 these are the defaults.
GAINS = {1e4: (48.0, -24.0), 3.2e5: (8.0, -8.0)}
VALIDATION_SEEDS = (11, 12)
TEST_SEEDS = range(1000, 1050)
VALIDATE_EVERY = 1000  # control steps
COPIES = {"ppo-agents": 2, "ppo": 4, "sac": 4}
LIBRARY = {"lib_name": "rayleigh_benard", "num_workers": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """One run of one method."""

    rayleigh: float
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"ra{self.rayleigh:.1e}-{self.method}-{self.seed}".replace("+0", "")

    def sim(self, agents: int = 1) -> dict[str, Any]:
        """Options of the simulator."""
        return {"rayleigh": self.rayleigh, "agents": agents, **CELLS.get(self.rayleigh, {})}

    @property
    def agents(self) -> int:
        return HEATERS if self.method == "ppo-agents" else 1


class Trained:
    """A policy of Stable-Baselines3 without exploration, for an observation of the whole cell."""

    def __init__(self, model: Any, agents: int) -> None:
        self._model = model
        self._agents = agents

    def __call__(self, observation: NDArray[Any]) -> NDArray[np.float32]:
        seen = agent_views(observation) if self._agents > 1 else observation
        action: NDArray[np.float32] = self._model.predict(seen, deterministic=True)[0]
        return action.ravel()


def new_model(case: Case, env: Any) -> Any:
    """An untrained model."""
    from stable_baselines3 import PPO, SAC

    common: dict[str, Any] = {"gamma": 0.97, "seed": case.seed, "device": "cpu"}
    if case.method == "sac":
        return SAC(
            "MlpPolicy", env, learning_rate=1e-3, buffer_size=50_000, learning_starts=400,
            train_freq=1, gradient_steps=2, policy_kwargs={"net_arch": [64, 64]}, **common,
        )  # fmt: skip
    shared = case.agents > 1
    return PPO(
        "MlpPolicy", env, n_steps=100, batch_size=600 if shared else 100,
        n_epochs=8, learning_rate=1e-3 if shared else 5e-4, gae_lambda=0.9,
        policy_kwargs={"log_std_init": -0.7, "net_arch": [64, 64]}, **common,
    )  # fmt: skip


def train(case: Case, steps: int, folder: Path) -> dict[str, Any]:
    """Train up to a number of control steps, from where an earlier run has stopped.

    Returns
    -------
    dict
        ``steps``; ``seconds`` of all runs; ``validation``: pairs of control steps and Nusselt
        number; ``best``: the lowest, whose policy is in ``best.zip``.

    Raises
    ------
    AlchemistError
        If the gangs cannot be started.
    """
    from stable_baselines3 import PPO, SAC

    from envs import HPCSimulatorEnv
    from envs.stable_baselines import HPCSimulatorVecEnv

    folder.mkdir(parents=True, exist_ok=True)
    notes, saved, buffer = folder / "run.json", folder / "model.zip", folder / "buffer.pkl"
    run: dict[str, Any] = {"steps": 0, "seconds": 0.0, "validation": [], "best": None}
    if notes.exists():
        run = json.loads(notes.read_text())
    if run["steps"] >= steps:
        return run
    env = HPCSimulatorVecEnv(
        LIBRARY, copies=COPIES[case.method], sim=case.sim(case.agents), on_failure="truncate"
    )
    check = HPCSimulatorEnv(LIBRARY, sim=case.sim())
    try:
        kind: Any = SAC if case.method == "sac" else PPO
        if run["steps"]:
            model = kind.load(saved, env=env, device="cpu")
            if buffer.exists():
                model.load_replay_buffer(buffer)
        else:
            model = new_model(case, env)
        while run["steps"] < steps:
            started = time.monotonic()
            target = min(steps, run["steps"] + VALIDATE_EVERY) - run["steps"]
            model.learn(target * case.agents, reset_num_timesteps=False)
            run["seconds"] += time.monotonic() - started
            run["steps"] = model.num_timesteps // case.agents
            policy = Trained(model, case.agents)
            nusselt = mean_nusselt(check, policy, VALIDATION_SEEDS)
            run["validation"].append([run["steps"], nusselt])
            if run["best"] is None or nusselt < run["best"]:
                run["best"] = nusselt
                model.save(folder / "best.zip")
            model.save(saved)
            if case.method == "sac":
                model.save_replay_buffer(buffer)
            partial = notes.with_suffix(".part")
            partial.write_text(json.dumps(run))
            partial.replace(notes)
            print(f"{case.name}: {run['steps']} steps, Nu {nusselt:.3f}", flush=True)
    finally:
        env.close()
        check.close()
    return run


def test(case: Case, policy: Policy, episodes: int) -> dict[str, Any]:
    """Mean Nusselt numbers of test episodes, and of the last 100 actions of each."""
    from envs import HPCSimulatorEnv

    with HPCSimulatorEnv(LIBRARY, sim=case.sim()) as env:
        found = [play(env, policy, seed).nusselt for seed in TEST_SEEDS[:episodes]]
    return {
        "nusselt": [round(float(each.mean()), 5) for each in found],
        "last_100": [round(float(each[-100:].mean()), 5) for each in found],
    }


def best_policy(case: Case, folder: Path) -> Policy:
    """The policy that a training has kept, or a baseline for this Rayleigh number."""
    if case.method == "p" and case.rayleigh in GAINS:
        return ProportionalControl(*GAINS[case.rayleigh])
    if case.method in POLICIES:
        return POLICIES[case.method]
    from stable_baselines3 import PPO, SAC

    kind: Any = SAC if case.method == "sac" else PPO
    return Trained(kind.load(folder / "best.zip", device="cpu"), case.agents)


def study(cases: list[Case], steps: int, episodes: int, out: Path, results: Path) -> None:
    """Run the cases that are not finished; a file for each goes to `results`."""
    results.mkdir(parents=True, exist_ok=True)
    for case in cases:
        told = results / f"{case.name}.json"
        trained = case.method in METHODS
        if told.exists():
            done = json.loads(told.read_text())
            if (not trained or done["steps"] >= steps) and len(done["nusselt"]) >= episodes:
                continue
        about: dict[str, Any] = {
            "rayleigh": case.rayleigh, "method": case.method, "seed": case.seed,
        }  # fmt: skip
        run = train(case, steps, out / case.name) if trained else {"steps": 0, "validation": []}
        found = test(case, best_policy(case, out / case.name), episodes)
        told.write_text(json.dumps({**about, **run, **found}) + "\n")
        print(f"{case.name}: Nu {np.mean(found['nusselt']):.3f}, {episodes} episodes", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line; run the study, or report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rayleigh_benard.study",
        description="Compare methods of control over several seeds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = Path("out/rayleigh_benard_study")
    parser.add_argument("--rayleigh", type=float, nargs="+", default=[8e4], help="Rayleigh numbers")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="methods")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each method")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--steps", type=int, default=20_000, help="control steps of each run")
    parser.add_argument("--episodes", type=int, default=len(TEST_SEEDS), help="test episodes")
    parser.add_argument("--out", type=Path, default=default, help="models and states of runs")
    parser.add_argument("--results", type=Path, default=default / "results", help="result files")
    parser.add_argument("--address", default=None, help="Ray cluster to join; None: start one")
    parser.add_argument("--report", action="store_true", help="only print and draw the results")
    options = parser.parse_args(argv)
    if options.report:
        print(report(options.results))
        return 0
    try:
        import stable_baselines3  # noqa: F401
        import torch
    except ImportError as error:
        print(f"the study needs Stable-Baselines3 ({error}): pip install 'alchemist-on-ray[sb3]'")
        return 2
    import ray

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"(ray|gymnasium|stable_baselines3)\b")
    cases = [Case(ra, method, 0) for ra in options.rayleigh for method in POLICIES]
    cases += [
        Case(ra, method, seed)
        for ra in options.rayleigh
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for method in options.methods
    ]  # fmt: skip
    if options.address is not None:
        ray.init(address=options.address)
    else:
        start_ray(max(4, os.cpu_count() or 1))
    try:
        study(cases, options.steps, options.episodes, options.out, options.results)
    finally:
        ray.shutdown()
    return 0


NAMES = {
    "none": "no control",
    "p": "P-control",
    "ppo": "PPO, one policy for the cell",
    "sac": "SAC, one policy for the cell",
    "ppo-agents": "PPO, one policy shared by the heaters",
}
COLOURS = {"ppo": "#2166ac", "sac": "#1b7837", "ppo-agents": "#b2182b"}
Runs = dict[tuple[float, str], list[dict[str, Any]]]


def read(results: Path) -> Runs:
    """The finished runs, by Rayleigh number and method, in the order of tables."""
    found: Runs = defaultdict(list)
    for file in sorted(results.glob("ra*.json")):
        run = json.loads(file.read_text())
        found[run["rayleigh"], run["method"]].append(run)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], list(NAMES).index(item[0][1]))))


def with_spread(values: list[float]) -> str:
    """Mean and standard deviation of the seeds' values."""
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def report(results: Path) -> str:
    """The table, as Markdown; draws ``study.png`` beside the results."""
    runs = read(results)
    head = (
        "Ra", "policy", "seeds", "control steps", "Nu, mean of the seeds ± standard deviation",
        "best .. worst seed", "last 100 actions",
    )  # fmt: skip
    rows = []
    for (rayleigh, method), found in runs.items():
        means = [float(np.mean(run["nusselt"])) for run in found]
        late = np.mean([np.mean(run["last_100"]) for run in found])
        between = f"{min(means):.3f} .. {max(means):.3f}" if len(means) > 1 else "-"
        steps = min(run["steps"] for run in found) or "-"
        rows.append((
            f"{rayleigh:.1e}", NAMES[method], len(found), steps, with_spread(means), between,
            f"{late:.3f}",
        ))  # fmt: skip
    if numbers := {rayleigh for rayleigh, _ in runs}:
        size = 5.2 * len(numbers), 4.0
        save_figure(lambda figure: draw_on(figure, runs), results / "study.png", size)
    return markdown(head, rows).rstrip()


def draw_on(figure: Any, runs: Runs) -> None:
    """Validated Nusselt numbers by control steps: the mean of the seeds, and their range."""
    numbers = sorted({key[0] for key in runs})
    for column, rayleigh in enumerate(numbers, 1):
        axes = figure.add_subplot(1, len(numbers), column)
        for method, colour in COLOURS.items():
            found = runs.get((rayleigh, method), [])
            length = min((len(run["validation"]) for run in found), default=0)
            if not length:
                continue
            curves = np.array([run["validation"][:length] for run in found])
            steps, nusselt = curves[0, :, 0], curves[:, :, 1]
            axes.plot(steps, nusselt.mean(axis=0), color=colour, label=NAMES[method])
            axes.fill_between(
                steps, nusselt.min(axis=0), nusselt.max(axis=0), color=colour, alpha=0.2, lw=0
            )
        for method in ("none", "p"):
            for run in runs.get((rayleigh, method), []):
                level = float(np.mean(run["nusselt"]))
                axes.axhline(level, color="#404040", lw=0.8, ls="--")
                beside = axes.get_yaxis_transform()
                axes.annotate(NAMES[method], (1.01, level), xycoords=beside, fontsize=8,
                              va="center", annotation_clip=False)  # fmt: skip
        axes.set_xlabel("control steps")
        axes.set_ylabel("Nusselt number (lower is better)")
        axes.set_title(f"Ra = {rayleigh:.1e}; mean and range of the seeds", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    curves_drawn = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    named = {name: curves_drawn[name] for name in NAMES.values() if name in curves_drawn}
    figure.legend(
        list(named.values()), list(named), loc="outside upper center", ncols=3, fontsize=8,
        frameon=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
