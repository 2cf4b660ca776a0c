"""A whole job on this machine: Ray brought up, a program run, everything ended. Needs no Slurm.

The batch system is what is missing: its list of nodes is a file with this host's name, and what
starts a supervisor on every node starts it here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster.batch_job import FOLDER_VARIABLE
from tests.support import commands, traces
from tests.support.suite import LONG

PROGRAM = """\
import json, os, socket, sys, time
import ray
from alchemist_ray import AlchemistSession
def is_open(port):
    with socket.socket() as sock:
        return sock.connect_ex((host, port)) == 0
host, _, gcs = os.environ["RAY_ADDRESS"].partition(":")
metrics = int(gcs) + 6
with AlchemistSession(2) as als:
    total = als.run(lambda comm: comm.allreduce(comm.rank + 1))
    print(json.dumps({"total": total, "cpus": ray.cluster_resources()["CPU"],
          "open": {"gcs": is_open(int(gcs)), "metrics": is_open(metrics), "client": is_open(10001)},
          "token": oct(os.stat(os.environ["RAY_AUTH_TOKEN_PATH"]).st_mode & 0o777)}), flush=True)
    time.sleep(float(sys.argv[1]))
sys.exit(7)
"""
GONE_S = 15.0
HOST = os.uname().nodename


def job_environment(folder: Path) -> dict[str, str]:
    """The environment in a job of PBS that has two CPUs of this machine."""
    (folder / "nodes").write_text(f"{HOST}\n" * 2)
    dropped = ("RAY_", "SLURM_", "ALCHEMIST_JOB")
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)} | {
        "PBS_JOBID": f"{os.getpid()}.here",
        "PBS_NODEFILE": str(folder / "nodes"),
        FOLDER_VARIABLE: str(folder / "folder"),
        "RAY_prestart_worker_first_driver": "0",  # as in tests/conftest.py
    }


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    """Runs a program in a job of one node with 2 CPUs; gives the process."""
    tmp = Path("/tmp") / f"j{os.getpid()}"
    tmp.mkdir()
    site = tmp_path / "here.toml"
    site.write_text(f'[nodes]\nstart = "env"\ntmp = "{tmp}"\n')
    (tmp_path / "program.py").write_text(PROGRAM)
    env = job_environment(tmp_path)
    started: list[subprocess.Popen[str]] = []

    def start(seconds: float, *options: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "alchemist_ray.cli", "pbs", "run", "--site", str(site)]
        program = [sys.executable, str(tmp_path / "program.py"), str(seconds)]
        started.append(
            subprocess.Popen(
                [*words, *options, "--", *program], env=env, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        return started[-1]

    start.env, start.site = env, str(site)
    yield start
    for process in started:
        process.kill()
        process.communicate()
    gone_s = traces.wait_until(lambda: not list(tmp.iterdir()), GONE_S, 0.1)
    left = [str(path) for path in tmp.rglob("*")][:5] if gone_s is None else []
    processes = [line for line in traces.processes().values() if f"alch-{os.getpid()}" in line]
    assert (left, processes) == ([], [])
    tmp.rmdir()


def ended(process: subprocess.Popen[str], code: int) -> str:
    """The errors that a job has printed when it has ended with this code."""
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    return said


def start_by(tmp_path: Path, script: str) -> None:
    """Have the supervisors started by a script, which is on no node."""
    program, site = tmp_path / "starts", tmp_path / "here.toml"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    site.write_text(site.read_text().replace('start = "env"', f'start = "{program}"'))


def told(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        pytest.fail(process.communicate()[1], pytrace=False)
    return json.loads(line)


def test_a_job_runs_and_passes_the_exit_code_on(job: Any, tmp_path: Path) -> None:
    process = job(0)
    ports = {"gcs": True, "metrics": False, "client": False}
    assert told(process) == {"total": 3, "cpus": 2.0, "token": "0o600", "open": ports}
    said = ended(process, 7)
    assert "Ray is up on 1 node with 2 CPUs" in said
    left = {path.name for path in (tmp_path / "folder").iterdir()}
    assert left == {"nodes.log"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_keeper_that_is_told_to_end_or_killed_leaves_nothing(
    job: Any, number: signal.Signals
) -> None:
    process = job(100)
    told(process)
    begin = traces.clock()
    process.send_signal(number)
    # The program's code: Ray has it leave with that.
    said = ended(process, number if number == signal.SIGTERM else -number)
    if number == signal.SIGTERM:
        assert "SIGTERM: the program has 45 s to end" in said
        assert said.splitlines()[-1] == "alchemist: the job was ended by SIGTERM; exit code 15"
    assert traces.clock() - begin < 30


def daemons(name: str) -> list[int]:
    """Processes of this job's Ray with this name, alive ones only."""
    mark = f"alch-{os.getpid()}"
    return [
        pid
        for pid, line in traces.processes().items()
        if Path(line.split(" ")[0]).name == name and mark in line
    ]


@pytest.mark.parametrize(
    ("name", "number", "late_s"),  # after 5 s `ray start` has ended the others
    [("raylet", 9, 0), ("raylet", 9, 5), ("raylet", 11, 0), ("gcs_server", 9, 0)],
)
def test_a_dead_process_of_ray_ends_the_job_with_its_name_and_log(
    job: Any, tmp_path: Path, name: str, number: int, late_s: float
) -> None:
    process = job(100)
    told(process)
    watching = [p for p, line in traces.processes().items() if "deploy.slurm.node {" in line]
    os.kill(watching[0], signal.SIGSTOP)
    begin = traces.clock()
    os.kill(*daemons(name), number)
    time.sleep(late_s)
    os.kill(watching[0], signal.SIGCONT)
    said = ended(process, 1)
    assert traces.clock() - begin < 60
    kept = tmp_path / "folder" / "ray-logs" / HOST
    cause = "was killed by signal 9 (SIGKILL)" if number == 9 else ""
    assert f"JobError: node {HOST}, with Ray's head, is lost: {name} on {HOST} {cause}" in said
    assert f"the end of {name}.out:\n" in said
    assert said.splitlines()[-1] == f"Ray's logs of this node are kept in {kept}"
    assert (kept / "ray.log").stat().st_size > 0
    assert (kept / f"{name}.out").stat().st_size > 0
    assert said.count("JobError") == 1


def test_a_raylet_that_dies_at_every_start_is_named_at_once(job: Any, tmp_path: Path) -> None:
    process = job(100)
    begin = traces.clock()
    while process.poll() is None and traces.clock() - begin < 60:
        for pid in daemons("raylet"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    said = ended(process, 1)
    died = f"raylet on {HOST} was killed by signal 9 (SIGKILL)"
    assert f"alchemist: Ray is started once more: {died}" in said
    assert f"JobError: Ray did not start: {died}" in said
    assert said.splitlines()[-1].startswith("Ray's logs of this node are kept in ")
    assert traces.clock() - begin < 60


def test_a_job_serves_clients_without_ray(job: Any, tmp_path: Path) -> None:

    def run(*words: str, code: int = 0) -> str:
        done = commands.alchemist(*words, code=code, env=job.env, HOME=str(tmp_path), limit_s=200)
        return done.stdout

    token = run("token", "create", "anna").strip()
    said = run("pbs", "start", "--site", job.site, "--gateway", "0")
    try:
        (address,) = re.findall("^address +(alchemist://.*)$", said, re.M)
        with AlchemistSession(2, address=address, token=token) as als:
            assert float(als.send_matrix(np.eye(4)).sum()) == 4
        run("pbs", "run", "--", sys.executable, str(tmp_path / "none.py"), code=2)  # python's own
    finally:
        run("pbs", "stop")


def test_a_node_that_does_not_start_is_named_in_the_last_line(job: Any, tmp_path: Path) -> None:
    start_by(tmp_path, "echo waiting for the file system\nexec sleep 60")
    said = ended(job(0, "--start-timeout", "2"), 1)
    assert "waiting for the file system" in said
    wanted = f"the supervisors on {HOST} did not start: no progress in 2 s (--start-timeout)"
    assert said.splitlines()[-1] == wanted


def test_a_list_of_nodes_with_other_names_is_said(job: Any, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("localhost\n")
    said = ended(job(0), 1)
    assert said.splitlines()[-1].endswith(f"{HOST} is not a node of this job: localhost")


@pytest.mark.skipif(not LONG, reason="31 s of waiting: make test-long")
def test_a_node_that_starts_slowly_is_waited_for_and_named(job: Any, tmp_path: Path) -> None:
    start_by(tmp_path, 'sleep 31\nexec env "$@"')
    process = job(0, "--start-timeout", "60")
    assert told(process)["total"] == 3
    said = ended(process, 7)
    found = re.findall(r"Ray took (\d+) s to start, including (\d+) s of waiting (.*)", said)
    ((_, waited, subject),) = found
    assert 31 <= int(waited) < 60
    assert subject == f"for the supervisors on {HOST}"
