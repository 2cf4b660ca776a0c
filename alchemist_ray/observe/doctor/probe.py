"""The part of the doctor on every node, and its concurrent calls: by Ray, by a step, or locally.

``python -m alchemist_ray.observe.doctor.probe`` reads one request per line, and answers in short
lines.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alchemist_ray.launchers.srun import srun_command
from alchemist_ray.observe.doctor import (
    environment,
    leftovers,
    machine,
    network,
    security,
    software,
)
from alchemist_ray.observe.doctor.finding import LIMIT_S, Check, Expected, run_checks, to_map
from mpi_workers.node.processes import die_with_parent
from mpi_workers.wire.interfaces import interfaces

PIECE_CHARS = 700  # srun forwards at most 1024 bytes of several tasks at a time


class Probe:
    """The checks of a node.

    Parameters
    ----------
    name : str, optional
        Name of the node. Default: its own.
    ray_address, ray_cpus : str, float
        The node's address and CPUs in Ray, if Ray runs there.
    """

    def __init__(self, name: str = "", ray_address: str = "", ray_cpus: float = 0.0) -> None:
        self.name = name or network.node_name()
        self._ray_address = ray_address
        self._ray_cpus = ray_cpus
        self._listener: network.Listener | None = None

    def examine(self, expected: Mapping[str, Any], peers: int) -> dict[str, Any]:
        """Run all checks of the node. Returns `findings`, `versions` and `interfaces`."""
        wanted = _expected(expected)
        checks: dict[str, Check] = {
            **machine.CHECKS,
            "cores": lambda _: machine.cores(self._ray_cpus),
            "network interface": lambda e: network.used_interface(e, self._ray_address, peers),
            "host name": network.own_name,
            **software.CHECKS,
            **environment.CHECKS,
            **security.CHECKS,
        }
        return {
            "findings": to_map(f.on(self.name) for f in run_checks(checks, wanted, LIMIT_S)),
            "versions": software.versions(),
            "interfaces": interfaces(),
        }

    def listen(self, expected: Mapping[str, Any], others: list[str]) -> list[Any]:
        """Open a listener for the other nodes. Returns its address."""
        self.stop_listening()
        towards = next((name for name in others if name != self.name), "")
        address = network.own_address(_expected(expected), self._ray_address, towards)
        self._listener = network.Listener(self.name, address)
        return list(self._listener.address)

    def dial(
        self, listeners: Mapping[str, Any], limit_s: float = network.DIAL_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Connect to the other nodes' listeners, see `network.dial`."""
        return network.dial(self.name, listeners, limit_s)

    def sweep(self, age_s: float) -> list[str]:
        """Remove shared memory of ranks just killed, see `leftovers.remove_mpich`."""
        return leftovers.remove_mpich(age_s)

    def stop_listening(self) -> None:
        """Close the listener."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _expected(told: Mapping[str, Any]) -> Expected:
    return Expected(**{**told, "interface": tuple(told["interface"])})


def main() -> None:
    """Answer requests ``[method, arguments]`` until the input ends.

    An answer is split into lines ``name|more|piece``: a step's output arrives in pieces of 1 KiB,
    mixed with those of other nodes.
    """
    probe = Probe()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer = {"value": getattr(probe, method)(*arguments)}
        except Exception as error:  # goes to the caller
            answer = {"error": f"{type(error).__name__}: {error}"}
        text = json.dumps(answer)
        pieces = [text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS)]
        for number, piece in enumerate(pieces, 1):
            sys.stdout.write(f"{probe.name}|{int(number < len(pieces))}|{piece}\n")
            sys.stdout.flush()
    os._exit(0)  # without waiting for a check that hangs


END_TIMEOUT_S = 5.0


def start(
    names: Sequence[str],
    *module: str,
    pmi: str = "none",
    tasks_per_node: int = 1,
    options: Sequence[str] = (),
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[str]:
    """Start a Python module on every node, next to the job's other steps, with piped output.

    Raises
    ------
    LaunchError
        If there is no srun.
    """
    command = [
        *srun_command(os.environ), "--overlap", f"--mpi={pmi}", "--quiet", *options,
        f"--nodes={len(names)}", f"--ntasks={tasks_per_node * len(names)}",
        f"--ntasks-per-node={tasks_per_node}", f"--nodelist={','.join(names)}",
        "--job-name=alchemist-doctor", sys.executable, "-m", *module,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace",
        preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
    )  # fmt: skip


def end(step: subprocess.Popen[Any]) -> None:
    """Wait for the step, then end it: a killed srun would leave its tasks until the job's end."""
    for stop in (step.terminate, step.kill):
        try:
            step.wait(END_TIMEOUT_S)
            return
        except subprocess.TimeoutExpired:
            stop()
    step.wait()


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
        self._step = start(names, MODULE, options=["--kill-on-bad-exit=0"], stdin=subprocess.PIPE)
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
        end(self._step)


if __name__ == "__main__":
    main()
