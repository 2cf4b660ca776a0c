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


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    """Runs a program in a job of one node with 2 CPUs; gives the process."""
    tmp = Path("/tmp") / f"j{os.getpid()}"
    tmp.mkdir()
    site = tmp_path / "here.toml"
    site.write_text(f'[nodes]\nstart = "env"\ntmp = "{tmp}"\n')
    (tmp_path / "nodes").write_text(f"{os.uname().nodename}\n" * 2)
    (tmp_path / "program.py").write_text(PROGRAM)
    dropped = ("RAY_", "SLURM_", "ALCHEMIST_JOB")
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)} | {
        "PBS_JOBID": f"{os.getpid()}.here",
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "ALCHEMIST_JOB_FOLDER": str(tmp_path / "folder"),
    }
    started: list[subprocess.Popen[str]] = []

    def start(seconds: float, *options: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "alchemist_ray.cli", "pbs", "run", "--site", str(site)]
        program = [sys.executable, str(tmp_path / "program.py"), str(seconds)]
        started.append(
            subprocess.Popen(
                [*words, *options, "--", *program],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
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
    _, said = process.communicate(timeout=60)
    assert process.returncode == 7, said
    assert "Ray is up on 1 node with 2 CPUs" in said
    left = {path.name for path in (tmp_path / "folder").iterdir()}
    assert left == {"nodes.log"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_keeper_that_is_told_to_end_or_killed_leaves_nothing(
    job: Any, number: signal.Signals
) -> None:
    process = job(100)
    told(process)
    begin = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert process.returncode == number  # the program's: Ray has it leave with that
        assert "SIGTERM: ending the program" in said
        assert said.splitlines()[-1] == "alchemist: the job was ended by SIGTERM; exit code 15"
    assert time.monotonic() - begin < 30


def daemons(name: str) -> list[int]:
    """Processes of this job's Ray with this name, alive ones only."""
    mark = f"alch-{os.getpid()}"
    return [
        pid
        for pid, line in traces.processes().items()
        if Path(line.split(" ")[0]).name == name and mark in line
    ]


@pytest.mark.parametrize(("name", "number"), [("raylet", 9), ("raylet", 15), ("gcs_server", 9)])
def test_a_dead_process_of_ray_ends_the_job_with_its_name_and_log(
    job: Any, tmp_path: Path, name: str, number: int
) -> None:
    process = job(100)
    told(process)
    (pid,) = daemons(name)
    begin = time.monotonic()
    os.kill(pid, number)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - begin < 15
    assert process.returncode == 1
    host = os.uname().nodename
    kept = tmp_path / "folder" / "ray-logs" / host
    ended = "was killed by signal 9 (SIGKILL)" if number == 9 else ""
    assert f"JobError: node {host}, with Ray's head, is lost: {name} on {host} {ended}" in said
    assert f"the end of {name}.out:\n" in said
    assert said.splitlines()[-1] == f"Ray's logs of this node are kept in {kept}"
    assert (kept / "ray.log").stat().st_size > 0
    assert (kept / f"{name}.out").stat().st_size > 0
    assert said.count("JobError") == 1


def test_a_raylet_that_dies_at_every_start_is_named_at_once(job: Any, tmp_path: Path) -> None:
    process = job(100)
    begin = time.monotonic()
    while process.poll() is None and time.monotonic() - begin < 60:
        for pid in daemons("raylet"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    died = f"raylet on {os.uname().nodename} was killed by signal 9 (SIGKILL)"
    assert f"alchemist: Ray is started once more: {died}" in said
    assert f"JobError: Ray did not start: {died}" in said
    assert said.splitlines()[-1].startswith("Ray's logs of this node are kept in ")
    assert time.monotonic() - begin < 60


def test_a_job_serves_clients_without_ray(job: Any, tmp_path: Path) -> None:

    def run(*words: str) -> str:
        done = commands.alchemist(*words, env=job.env, HOME=str(tmp_path), limit_s=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    token = run("token", "create", "anna").strip()
    said = run("pbs", "start", "--site", job.site, "--gateway", "0")
    try:
        (address,) = re.findall("^address +(alchemist://.*)$", said, re.M)
        with AlchemistSession(2, address=address, token=token) as als:
            assert float(als.send_matrix(np.eye(4)).sum()) == 4
    finally:
        run("pbs", "stop")


def test_a_program_that_cannot_start_is_reported(job: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").unlink()
    process = job(0)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 2, said  # python's own: no such file


def test_a_node_that_does_not_start_is_named_in_the_last_line(job: Any, tmp_path: Path) -> None:
    site = tmp_path / "here.toml"
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\necho waiting for the file system\nexec sleep 60\n")
    hangs.chmod(0o755)
    site.write_text(site.read_text().replace('start = "env"', f'start = "{hangs}"'))
    process = job(0, "--start-timeout", "2")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "waiting for the file system" in said
    host = os.uname().nodename
    wanted = f"the supervisors on {host} did not start: no progress in 2 s (--start-timeout)"
    assert said.splitlines()[-1] == wanted


def test_a_list_of_nodes_with_other_names_is_said(job: Any, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("localhost\n")
    process = job(0)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    host = os.uname().nodename
    assert said.splitlines()[-1].endswith(f"{host} is not a node of this job: localhost")


@pytest.mark.skipif(not LONG, reason="31 s of waiting: make test-long")
@pytest.mark.timeout(240)
def test_a_node_that_starts_slowly_is_waited_for_and_named(job: Any, tmp_path: Path) -> None:
    site = tmp_path / "here.toml"
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\nsleep 31\nexec env "$@"\n')
    slow.chmod(0o755)
    site.write_text(site.read_text().replace('start = "env"', f'start = "{slow}"'))
    process = job(0, "--start-timeout", "60")
    assert told(process)["total"] == 3
    _, said = process.communicate(timeout=60)
    assert process.returncode == 7, said
    host = os.uname().nodename
    found = re.findall(r"Ray took (\d+) s to start, including (\d+) s of waiting (.*)", said)
    ((_, waited, subject),) = found
    assert 31 <= int(waited) < 60
    assert subject == f"for the supervisors on {host}"
