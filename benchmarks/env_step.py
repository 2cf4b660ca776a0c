"""Overhead of an environment's step, scaling, restarts."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ali import scaffold
from benchmarks.bare_chain import work
from benchmarks.harness import Report, alone, in_batches, timed
from envs import EnvError, HPCSimulatorEnv, HPCSimulatorVectorEnv
from mpi_workers.local import local_gang
from mpi_workers.wire.blocking import ShortWait

BARE = "benchmarks.bare_env:step_s"
RBC = "rayleigh_benard"
COPIES = 12
CLIENT_S, RANK_S = 16e-6, 12e-6  # of a step that does nothing, without messages and waits
FIELDS = {10_000: 0.1, 1_000_000: 1.0}  # numbers of an observation: the target in ms
LARGE = ({"width": 800, "height": 256}, {"width": 1600, "height": 512})


def run() -> Report:
    report = Report("env_step")
    with tempfile.TemporaryDirectory() as folder:
        idle = built(Path(folder))
        for ranks in (1, 2, 4):
            _overhead(report, idle, ranks)
        for size, wanted in FIELDS.items():
            _field(report, idle, size, wanted)
        _restart(report, idle)
    _copies(report)
    _scaling(report)
    return report


def built(folder: Path) -> str:
    """The simulator whose step does nothing."""
    target = folder / "libidle.so"
    source = Path(__file__).with_name("idle.c")
    command: list[Any] = [scaffold.mpi_compiler("mpicc"), "-O2", "-shared", "-fPIC"]
    command += [f"-I{scaffold.include_directory()}", "-o", target, source]
    subprocess.run(list(map(str, command)), check=True, timeout=100)
    return str(target)


def _overhead(report: Report, idle: str, ranks: int) -> None:
    action = np.zeros(4)
    with HPCSimulatorEnv(lib_name="idle", lib_path=idle, num_workers=ranks) as env:
        env.reset(seed=0)
        times, *_, worst = in_batches(lambda: env.step(action), 1000)
    report.add(
        f"env.step beyond the simulation, p50, {ranks} rank{'s' if ranks > 1 else ''}",
        times[500] * 1e3, 0.05, "ms", at_most=True,
        detail=f"best of 6 batches of 1000; p99 {times[990] * 1e3:.2f} ms; worst batch's p50 "
        f"{worst[500] * 1e3:.2f}; bare processes with as much work: {_bare_exchange(ranks):.3f}",
    )  # fmt: skip


def _bare_exchange(processes: int) -> float:
    """p50 in ms of an order to bare processes and the answer of the first.

    Each works as long as a rank does for a step that does nothing, and this process as long as the
    environment; they wait as these do.
    """
    pids: list[int] = []
    sockets: list[socket.socket] = []
    poll = select.poll()
    for number in range(processes):
        ours, theirs = socket.socketpair()
        if (pid := os.fork()) == 0:
            try:
                _obey(theirs, answers=number == 0)
            finally:
                os._exit(0)
        theirs.close()
        pids.append(pid)
        sockets.append(ours)
        poll.register(ours, select.POLLIN)
    wait = ShortWait(poll)

    def exchange() -> None:
        work(CLIENT_S)
        for sock in sockets:
            sock.sendall(bytes(128))
        wait(None)
        sockets[0].recv(512)

    best = in_batches(exchange, 1000)[0][500]
    for sock, pid in zip(sockets, pids, strict=True):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        sock.close()
    return best * 1e3


def _obey(sock: socket.socket, *, answers: bool) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    wait = ShortWait(poll)
    while wait(None) and sock.recv(512):
        work(RANK_S)
        if answers:
            sock.sendall(bytes(64))


def _field(report: Report, idle: str, size: int, wanted: float) -> None:
    """A step whose observation is a field."""
    with HPCSimulatorEnv(lib_name="idle", lib_path=idle, sim={"size": size}) as env:
        env.reset(seed=0)
        times, *_ = in_batches(lambda: env.step(np.zeros(4)), 50)
    report.add(
        f"env.step with {size:.0e} float32 observed, p50, 1 rank", times[25] * 1e3, wanted, "ms",
        at_most=True, detail=f"best of 6 batches of 50; fastest step {times[0] * 1e3:.2f} ms",
    )  # fmt: skip


def _restart(report: Report, idle: str) -> None:
    found = []
    with HPCSimulatorEnv(lib_name="idle", lib_path=idle, num_workers=2) as env:
        for _ in range(3):
            env.reset(seed=0)
            session: Any = env._simulation._session
            os.kill(session.list_workers()[1].pid, signal.SIGKILL)
            start = time.perf_counter()
            try:
                while True:
                    env.step(np.zeros(4))
            except EnvError:
                env.reset(seed=0)
                env.step(np.zeros(4))
            found.append(time.perf_counter() - start)
    report.add(
        "from the kill of a rank to the end of the next step", min(found), 3.0, "s", at_most=True,
        detail=f"2 ranks: error, new gang, simulator; worst of 3 {max(found):.2f} s",
    )  # fmt: skip


def _copies(report: Report) -> None:
    """12 copies of the 96 x 31 cell, compared with the same C code in one process."""
    gangs = {ranks: float("inf") for ranks in (1, 2)}
    bare = float("inf")
    actions = np.zeros((COPIES, 12))
    sim = {"spin_up": 0.0, "reference": 1.0}  # the cost of a step does not depend on the flow
    told = json.dumps(sim)
    for _ in range(3):  # alternating
        bare = min(bare, local_gang.run(BARE, 1, RBC, None, told, COPIES, 25, timeout=200.0))
        for ranks in gangs:
            config = {"lib_name": RBC, "num_workers": ranks, "copies": COPIES, "sim": sim}
            with HPCSimulatorVectorEnv(config) as env:
                env.reset(seed=0)
                times = [timed(lambda: env.step(actions)) for _ in range(25)]
            gangs[ranks] = min(gangs[ranks], float(np.median(times)))
    detail = f"{COPIES / bare:.0f} steps/s in process"
    for ranks, seconds in gangs.items():
        report.add(
            f"VectorEnv of {COPIES} copies, {ranks} rank{'s' if ranks > 1 else ''}",
            seconds / bare, 1.3, "x in process", at_most=True,
            detail=f"RBC 96 x 31; {COPIES / seconds:.0f} steps/s, {detail}",
        )  # fmt: skip


def _scaling(report: Report) -> None:
    """A large cell on one rank and on two, alternating; 10 lattice steps per step."""
    for size in LARGE:
        found = {1: float("inf"), 2: float("inf")}
        sim = {**size, "spin_up": 0.0, "time_step": 10 * 0.2 / size["height"], "reference": 1.0}
        for _ in range(2):
            for ranks in found:
                config = {"lib_name": RBC, "num_workers": ranks, "sim": sim}
                with HPCSimulatorEnv(config, step_timeout_s=300.0) as env:
                    env.reset(seed=0)
                    times = [timed(lambda: env.step(np.zeros(12))) for _ in range(10)]
                found[ranks] = min(found[ranks], float(np.median(times)))
        report.add(
            f"RBC {size['width']} x {size['height']}: 2 ranks for 1", found[1] / found[2], 1.5,
            "x as fast", detail=f"10 lattice steps: {found[1] * 1e3:.0f} ms, "
            f"{found[2] * 1e3:.0f} ms on 2 ranks",
        )  # fmt: skip


if __name__ == "__main__":
    alone(run)
