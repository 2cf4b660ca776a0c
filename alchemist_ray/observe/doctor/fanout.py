"""Probes on all nodes, called concurrently: by Ray, by a step of a batch job, or locally."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alchemist_ray.observe.doctor import slurm_step
from alchemist_ray.observe.doctor.probe import Probe

MODULE = "alchemist_ray.observe.doctor.probe"


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The result for a node that did not answer: the reason."""

    reason: str


class Fanout(Protocol):
    """Probes on nodes."""

    names: Sequence[str]

    def ask(self, method: str, *arguments: Any, limit_s: float) -> dict[str, Any]:
        """Call a method of all probes. Returns the result, or a `NoAnswer`, by node."""

    def close(self) -> None:
        """End the probes."""


class LocalProbe:
    """A probe in this process."""

    def __init__(self) -> None:
        self._probe = Probe()
        self.names: Sequence[str] = [self._probe.name]

    def ask(self, method: str, *arguments: Any, limit_s: float) -> dict[str, Any]:
        return {self._probe.name: getattr(self._probe, method)(*arguments)}

    def close(self) -> None:
        self._probe.stop_listening()


class RayProbes:
    """An actor on every node of the Ray cluster that this process has joined.

    They need no CPUs, so they start even if all are in use.
    """

    def __init__(self) -> None:
        self.nodes = named_nodes()
        self.names: Sequence[str] = list(self.nodes)
        kind: Any = ray.remote(Probe)
        self._actors = {
            name: kind.options(
                num_cpus=0,
                max_concurrency=2,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(name, node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0))
            for name, node in self.nodes.items()
        }

    def ask(self, method: str, *arguments: Any, limit_s: float) -> dict[str, Any]:
        shared = [ray.put(argument) for argument in arguments]  # copied to each node once
        refs = {
            name: getattr(actor, method).remote(*shared) for name, actor in self._actors.items()
        }
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=limit_s)
        answers: dict[str, Any] = {}
        for name, ref in refs.items():
            try:
                answers[name] = ray.get(ref, timeout=0)
            except ray.exceptions.GetTimeoutError:
                answers[name] = NoAnswer(f"no answer in {limit_s:g} s")
            except ray.exceptions.RayError as error:
                lines = str(error).strip().splitlines()
                answers[name] = NoAnswer(lines[-1] if lines else type(error).__name__)
        return answers

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)


def named_nodes() -> dict[str, dict[str, Any]]:
    """Return Ray's live nodes by host name (and address, if two have the same name)."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    hosts = [node["NodeManagerHostname"] for node in alive]
    return {
        host if hosts.count(host) == 1 else f"{host} ({node['NodeManagerAddress']})": node
        for host, node in sorted(
            zip(hosts, alive, strict=True),
            key=lambda pair: (pair[0], pair[1]["NodeManagerAddress"], pair[1]["NodeID"]),
        )
    }


class StepProbes:
    """A process on every node of a Slurm job, started as one step.

    srun forwards its input to all of them, and returns their output: only Slurm itself needs to
    work between the nodes.

    Raises
    ------
    LaunchError
        If there is no srun.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names: Sequence[str] = list(names)
        self._step = slurm_step.start(
            names, MODULE, options=["--kill-on-bad-exit=0"], stdin=subprocess.PIPE
        )
        self._answers: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._words: list[str] = []
        for read in (self._read, self._listen):
            threading.Thread(target=read, daemon=True).start()

    def _read(self) -> None:
        assert self._step.stdout is not None
        parts: dict[str, str] = {}
        for line in self._step.stdout:
            name, more, piece = (*line.rstrip("\n").split("|", 2), "", "")[:3]
            if name not in self.names:
                self._words.append(line)
                continue
            parts[name] = parts.get(name, "") + piece
            if more == "0":
                with contextlib.suppress(ValueError):
                    self._answers.put((name, json.loads(parts.pop(name))))
        self._answers.put(None)  # the step is over

    def _listen(self) -> None:
        assert self._step.stderr is not None
        for line in self._step.stderr:
            self._words.append(line)

    def ask(self, method: str, *arguments: Any, limit_s: float) -> dict[str, Any]:
        assert self._step.stdin is not None
        with contextlib.suppress(OSError):
            self._step.stdin.write(json.dumps([method, arguments]) + "\n")
            self._step.stdin.flush()
        answers: dict[str, Any] = {}
        end = time.monotonic() + limit_s
        why = f"no answer in {limit_s:g} s"
        while len(answers) < len(self.names):
            try:
                told = self._answers.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                break
            if told is None:
                why = f"the step is over: {' '.join(''.join(self._words).split())[-300:]}"
                self._answers.put(None)
                break
            name, answer = told
            answers[name] = answer["value"] if "value" in answer else NoAnswer(answer["error"])
        return {name: answers.get(name, NoAnswer(why)) for name in self.names}

    def close(self) -> None:
        assert self._step.stdin is not None
        with contextlib.suppress(OSError):
            self._step.stdin.close()  # the probes end
        slurm_step.end(self._step)
