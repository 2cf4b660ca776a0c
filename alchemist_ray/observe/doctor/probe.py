"""The part of the doctor on every node, and its concurrent calls: by Ray, by a step, or locally.

A `Listener` listens on a port that the kernel chooses, as gangs do, and sends its name and clock to
each caller. `dial` connects to the other nodes' listeners. Each node dials all others of up to 16
nodes; of more, the neighbours at distances 1, 2, 4, ..., so that its work grows with the logarithm
of their number.

``python -m alchemist_ray.observe.doctor.probe`` reads one request per line, and answers in short
lines.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import itemgetter
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alchemist_ray.deploy.slurm.allocation import this_node
from alchemist_ray.deploy.slurm.signals import SIGNALLED_END_S, end
from alchemist_ray.deploy.slurm.sites import Site
from alchemist_ray.errors import JobError
from alchemist_ray.launchers.srun import srun_command
from alchemist_ray.observe.doctor import node
from alchemist_ray.observe.doctor.finding import BAD, OK, Finding, graded, named, run_checks
from alchemist_ray.plural import listed
from mpi_workers.node.processes import die_with_parent
from mpi_workers.wire.interfaces import interfaces
from mpi_workers.wire.sockets import keep_listening

ALL_PAIRS = 16
DIAL_TIMEOUT_S = 5.0
HELLO_NBYTES = 4096
FAILED_SHOWN = 4
CLOCK_WARN_S, CLOCK_BAD_S = 1.0, 60.0


# --- between nodes --------------------------------------------------------------------


class Listener:
    """Listens at this node's address until closed; sends callers its name and clock."""

    def __init__(self, name: str, address: str) -> None:
        self._name = name
        self._socket = socket.create_server((address, 0), backlog=1024)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                try:
                    caller, _ = self._socket.accept()
                except OSError as error:
                    keep_listening(error)
                    continue
                with caller, contextlib.suppress(OSError):
                    caller.settimeout(DIAL_TIMEOUT_S)
                    caller.sendall(json.dumps([self._name, time.time()]).encode() + b"\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._socket.close()


def neighbours(name: str, names: Sequence[str]) -> list[str]:
    """Return the nodes that a node dials."""
    count, own = len(names), names.index(name)
    if count <= ALL_PAIRS:
        return [other for other in names if other != name]
    steps = [1 << k for k in range(count.bit_length()) if 1 << k < count]
    return sorted(
        {names[(own + sign * step) % count] for step in steps for sign in (1, -1)} - {name}
    )


def dial(
    name: str, listeners: Mapping[str, Sequence[Any]], limit_s: float = DIAL_TIMEOUT_S
) -> list[dict[str, Any]]:
    """Connect to the neighbours' listeners.

    Returns
    -------
    list of dict
        For each: its name, `to`; the error, `why` (empty: it answered); of one that answered, the
        seconds that its clock is `ahead` of ours, and their accuracy, `within`.
    """
    wanted = neighbours(name, sorted(listeners)) if name in listeners else []
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(wanted)))) as threads:
        return list(threads.map(lambda to: _dial(to, listeners[to], limit_s), wanted))


def _dial(to: str, address: Sequence[Any], limit_s: float) -> dict[str, Any]:
    host, port = address
    try:
        with socket.create_connection((host, port), limit_s) as connection:
            asked = time.time()
            with connection.makefile("rb") as answer:
                text = answer.readline(HELLO_NBYTES)
            got = time.time()
        who, clock = json.loads(text)
    except TimeoutError:
        return {"to": to, "why": f"no answer from {host}:{port} in {limit_s:g} s"}
    except OSError as error:
        return {"to": to, "why": f"{host}:{port}: {error.strerror or error}"}
    except ValueError:
        return {"to": to, "why": f"another program answers at {host}:{port}"}
    if who != to:
        return {"to": to, "why": f"{who} answers at {host}:{port}: two nodes have one address"}
    return {"to": to, "why": "", "ahead": clock - (asked + got) / 2, "within": (got - asked) / 2}


def same_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Check that all nodes (and this process, under its own name) have the same versions.

    Parameters
    ----------
    versions : mapping
        By node, then by package.
    """
    findings, agreed = [], []
    for package in dict.fromkeys(package for told in versions.values() for package in told):
        having = {name: told.get(package, "none") for name, told in versions.items()}
        [(usual, _)] = Counter(having.values()).most_common(1)
        agreed.append(f"{package} {usual}")
        findings += [
            Finding(
                BAD, f"{package} {has}, the others have {usual}",
                "install the same version there (one environment on a shared file system, or one "
                "image); check PYTHONPATH",
                node=name,
            )
            for name, has in having.items() if has != usual
        ]  # fmt: skip
    return named("versions", findings or [Finding(OK, ", ".join(agreed))])


Calls = Mapping[str, Sequence[Mapping[str, Any]]]  # by node: the results of `dial` there


def reached(dialled: Calls) -> Iterator[Finding]:
    """Check that nodes reach each other."""
    pairs = [(node, told) for node, calls in dialled.items() for told in calls]
    failed = [(node, told) for node, told in pairs if told["why"]]
    if failed:
        told = listed([f"{a} -> {b['to']}: {b['why']}" for a, b in failed], FAILED_SHOWN, "; ")
        yield Finding(
            BAD, f"{len(failed)} of {len(pairs)} connections fail: {told}",
            "allow TCP between the nodes on all ports of net.ipv4.ip_local_port_range, which gangs "
            "and MPI use: firewalld, iptables, NetworkPolicy; or select another interface "
            "(nodes.interface of the site file)",
            "between nodes", failed[0][0] if len({node for node, _ in failed}) == 1 else "",
        )  # fmt: skip
    elif pairs:
        yield Finding(OK, f"{len(pairs)} connections, in both directions", check="between nodes")


def clocks(dialled: Calls) -> Iterator[Finding]:
    """Check that the nodes' clocks agree, within the accuracy of the round trips."""
    offsets = [
        (abs(told["ahead"]) - told["within"], told, node)
        for node, calls in dialled.items()
        for told in calls
        if not told["why"]
    ]
    if offsets:
        least, told, node = max(offsets, key=lambda entry: entry[0])
        yield graded(
            -least, -CLOCK_BAD_S, -CLOCK_WARN_S,
            f"{told['to']} is {told['ahead']:+.3f} s from {node} (known to "
            f"{told['within'] * 1e3:.1f} ms)",
            "run chronyd or ntpd on every node: munge and tokens fail between different times, "
            "make rebuilds too much or too little, and logs cannot be compared",
            "clocks",
        )  # fmt: skip


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
        self.name = name or this_node()
        self._ray_address = ray_address
        self._ray_cpus = ray_cpus
        self._listener: Listener | None = None

    def examine(self, site: Site, names: Sequence[str]) -> dict[str, Any]:
        """Run all checks of the node, which is one of `names`.

        Returns `findings`, `versions`, `interfaces`, and the address of a `listener` for the other
        nodes.
        """
        checks = node.checks(self._ray_address, self._ray_cpus, len(names))
        return {
            "findings": [replace(found, node=self.name) for found in run_checks(checks, site)],
            "versions": node.versions(),
            "interfaces": interfaces(),
            "listener": self.listen(site, names) if len(names) > 1 else None,
        }

    def listen(self, site: Site, names: Sequence[str]) -> tuple[str, int]:
        """Open a listener for the other nodes. Returns its address."""
        towards = next(name for name in names if name != self.name)
        address = node.own_address(site, self._ray_address, towards)
        self._listener = Listener(self.name, address)
        return self._listener.address

    def dial(
        self, listeners: Mapping[str, Any], limit_s: float = DIAL_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Connect to the other nodes' listeners, see `dial`."""
        return dial(self.name, listeners, limit_s)

    def sweep(self, age_s: float) -> list[str]:
        """Remove shared memory of ranks just killed, see `node.remove_mpich`."""
        return node.remove_mpich(age_s)


PIECE_CHARS = 700  # srun forwards at most 1024 bytes of several tasks at a time


def encoded(value: Any) -> str:
    """A request or an answer as a word for the pipes of a step, which only its user can write."""
    return base64.b64encode(pickle.dumps(value)).decode()


def decoded(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def main() -> None:
    """Answer requests ``(method, arguments)`` until the input ends.

    An answer is split into lines ``name|more|piece``: a step's output arrives in pieces of 1 KiB,
    mixed with those of other nodes.
    """
    probe = Probe()
    for line in sys.stdin:
        method, arguments = decoded(line)
        try:
            answer = getattr(probe, method)(*arguments)
        except Exception as error:  # goes to the caller
            answer = JobError(f"{type(error).__name__}: {error}")
        text = encoded(answer)
        pieces = [text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS)]
        for number, piece in enumerate(pieces, 1):
            sys.stdout.write(f"{probe.name}|{int(number < len(pieces))}|{piece}\n")
            sys.stdout.flush()
    os._exit(0)  # without waiting for a check that hangs


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


MODULE = "alchemist_ray.observe.doctor.probe"


class RayProbes:
    """An actor on every node of the Ray cluster that this process has joined.

    They need no CPUs, so they start even if all are in use.

    `ask` calls a method of all probes, and returns by node the result, or the `JobError` of one
    that did not answer; `close` ends the probes.
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
                answers[name] = JobError(f"no answer in {limit_s:g} s")
            except ray.exceptions.RayError as error:
                lines = str(error).strip().splitlines()
                answers[name] = JobError(lines[-1] if lines else type(error).__name__)
        return answers

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)


def named_nodes() -> dict[str, dict[str, Any]]:
    """Return Ray's live nodes by host name (and address, if two have the same name)."""
    order = itemgetter("NodeManagerHostname", "NodeManagerAddress", "NodeID")
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=order)
    hosts = [node["NodeManagerHostname"] for node in alive]
    return {
        host if hosts.count(host) == 1 else f"{host} ({node['NodeManagerAddress']})": node
        for host, node in zip(hosts, alive, strict=True)
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
        assert self._step.stderr is not None
        for read, *given in ((self._read,), (self._words.extend, self._step.stderr)):
            threading.Thread(target=read, args=given, daemon=True).start()

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
                    self._answers.put((name, decoded(parts.pop(name))))
        self._answers.put(None)  # the step is over

    def ask(self, method: str, *arguments: Any, limit_s: float) -> dict[str, Any]:
        assert self._step.stdin is not None
        with contextlib.suppress(OSError):
            self._step.stdin.write(encoded((method, arguments)) + "\n")
            self._step.stdin.flush()
        answers: dict[str, Any] = {}
        end = time.monotonic() + limit_s
        late = JobError(f"no answer in {limit_s:g} s")
        while len(answers) < len(self.names):
            try:
                told = self._answers.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                break
            if told is None:
                said = " ".join("".join(self._words).split())[-300:]
                late = JobError(f"the step is over: {said}")
                self._answers.put(None)
                break
            answers[told[0]] = told[1]
        return {name: answers.get(name, late) for name in self.names}

    def close(self) -> None:
        assert self._step.stdin is not None
        with contextlib.suppress(OSError):
            self._step.stdin.close()  # the probes end
        end(self._step, SIGNALLED_END_S)


if __name__ == "__main__":
    main()
