"""Start of a gang, an empty call, an idle gang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, Time, Turns, alone, in_batches, in_turns, timed

SECOND_TURNS = 8
# CPU time per message of the processes of a bare chain (`/proc/PID/schedstat`).
SOCKETS_US = (8.0, 15.0, 21.0, 8.0)
PAUSES_S = {"right after another": 0.0, "2 s after another": 2.0}


def run() -> Report:
    report = Report("launch")
    sessions: list[AlchemistSession] = []
    cold = timed(lambda: sessions.append(AlchemistSession(4, progress=False)))
    report.add("gang of 4 ready, cold cluster", cold, 5.0, "s", at_most=True, detail=
               "Ray runs; no agent, no fork server yet")  # fmt: skip
    for when, beside in _second_sessions().items():
        report.add(
            f"gang of 4 ready, a second session beside an open one, {when}", beside, 0.15, "s",
            at_most=True, detail=f"{beside}; with both gangs no CPU of the cluster is free",
        )  # fmt: skip
    for als in sessions:
        als.close()

    def warm() -> None:
        with AlchemistSession(4, progress=False):
            pass

    ended = in_turns({"warm": warm}, 5)["warm"]
    report.add(
        "gang of 4 ready and ended again, warm", ended, 1.0, "s", at_most=True,
        detail=f"a new session; {ended}",
    )  # fmt: skip
    with AlchemistSession(2, progress=False, name="bench-attached", lifetime="detached"):
        attach = partial(AlchemistSession.attach, "bench-attached")
        attached = in_turns({"attach": lambda: attach().detach()}, 5)["attach"]
    AlchemistSession.stop_gang("bench-attached")
    report.add(
        "attach to a gang with a name", attached, 0.3, "s", at_most=True, detail=f"{attached}"
    )
    with AlchemistSession(2, progress=False) as als:
        echo = als.load_library("echo")
        pids = [worker.pid for worker in als.list_workers()]
        processes = [os.getpid(), _manager_pid(als), _parent(pids[0]), pids[0]]
        before = [_cpu_s(pid) for pid in processes]
        times, *_, worst = in_batches(echo.nothing, 1000)
        after = [_cpu_s(pid) for pid in processes]
        spent_us = [1e6 * (b - a) / 6000 for a, b in zip(before, after, strict=True)]
        bare_s = min(_bare_call() for _ in range(6))
        work_us = [max(0.0, all_us - own) for all_us, own in zip(spent_us, SOCKETS_US, strict=True)]
        busy_s = min(_bare_call(0.0, *work_us) for _ in range(6))
        report.add(
            "empty routine, round trip p50, 2 ranks", times[500] * 1e3, 0.2, "ms", at_most=True,
            detail=f"best of 6 batches, p99 {times[990] * 1e3:.2f} ms; worst batch's p50 "
            f"{worst[500] * 1e3:.2f}; CPU time of user's process, GroupManager, proxy, a rank: "
            f"{', '.join(f'{us:.0f}' for us in spent_us)} µs; a bare chain of sockets "
            f"{bare_s * 1e3:.2f}, with as much CPU time in each process {busy_s * 1e3:.2f}, "
            f"a Ray actor call {_actor_call() * 1e3:.2f} ms",
        )  # fmt: skip
        report.add(
            "an idle gang's CPU", 100 * idle_share(pids), 1.0, "% of a core", at_most=True,
            detail="ranks and their proxy, over 5 s",
        )  # fmt: skip
    return report


def _second_sessions() -> dict[str, Time]:
    """Starts of sessions, each after the end of the one before: at once, and after a pause."""
    turns = Turns()
    for turn in range(SECOND_TURNS):
        for when, pause_s in PAUSES_S.items():
            time.sleep(pause_s)
            begin = time.perf_counter()
            with AlchemistSession(4, progress=False):
                seconds = time.perf_counter() - begin
            if turn:  # before the first one no other has ended
                turns.add(when, seconds)
    return turns.times()


def _bare_call(*options: float) -> float:
    """p50 of a message through as many sockets and processes, in seconds."""
    command = [sys.executable, "-m", "benchmarks.bare_chain", "2", "1000", *map(str, options)]
    return float(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)


def _actor_call() -> float:
    """p50 of an empty Ray actor call, in seconds."""

    class Nothing:
        def call(self) -> None:
            pass

    actor = ray.remote(Nothing).options(num_cpus=0).remote()
    ray.get(actor.call.remote())
    times = sorted(timed(lambda: ray.get(actor.call.remote())) for _ in range(500))
    ray.kill(actor)
    return times[250]


def idle_share(pids: list[int], seconds: float = 5.0) -> float:
    """Share of a core that these ranks and their proxies use."""
    watched = [*pids, *set(map(_parent, pids))]
    before = sum(map(_cpu_s, watched))
    time.sleep(seconds)
    return (sum(map(_cpu_s, watched)) - before) / seconds


def _manager_pid(als: AlchemistSession) -> int:
    actor: Any = als.connection.transport.manager.actor
    pid: int = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    return pid


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _cpu_s(pid: int) -> float:
    return sum(
        int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    )


if __name__ == "__main__":
    alone(run)
