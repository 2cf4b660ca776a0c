"""`alchemist slurm start` and `stop` when something is odd: numbers, processes, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alchemist_ray.cli import main
from alchemist_ray.cluster import batch_job
from alchemist_ray.cluster.batch_job import JobCluster, JobFolder
from alchemist_ray.deploy.slurm import cli
from alchemist_ray.errors import JobError
from tests.alchemist_ray.deploy.slurm.test_run import job_environment
from tests.support import traces

WAIT_S = 30.0


@pytest.mark.parametrize("told", ["nan", "inf", "-5", "0", "soon"])
def test_a_time_limit_that_is_none(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.START_VARIABLE, told)
    with pytest.raises(JobError, match=f"{cli.START_VARIABLE}.*must be a number .* got {told}"):
        cli._start_s()
    monkeypatch.setenv(cli.START_VARIABLE, "2.5")
    assert cli._start_s() == 2.5


def test_a_process_with_the_number_of_a_keeper_that_has_ended_is_let_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = JobFolder(tmp_path / "7")
    folder.make()
    monkeypatch.setenv(batch_job.FOLDER_VARIABLE, str(folder.path))
    with subprocess.Popen(["sleep", "60"], cwd="/") as other:
        try:
            host = os.uname().nodename
            found = JobCluster("127.0.0.1:1", "7", host, [host], 1, host, other.pid, [], {})
            folder.write_cluster(found)
            assert folder.live_cluster() is None
            assert main(["slurm", "stop"]) == 0
            assert folder.cluster() is None
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_start_ends_the_keeper(tmp_path: Path, number: signal.Signals) -> None:
    hangs = tmp_path / "hangs"
    pid = tmp_path / "pid"
    hangs.write_text(f"#!/bin/sh\necho $$ > {pid}.new\nmv {pid}.new {pid}\nexec sleep 60\n")
    hangs.chmod(0o755)
    site = tmp_path / "here.toml"
    site.write_text(f'[nodes]\nstart = "{hangs}"\n')
    env = job_environment(tmp_path)
    words = [sys.executable, "-m", "alchemist_ray.cli", "pbs", "start", "--site", str(site)]
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as starting:
        assert traces.wait_until(pid.exists, WAIT_S, 0.05) is not None
        step = Path("/proc") / pid.read_text().strip()
        starting.send_signal(number)
        _, said = starting.communicate(timeout=WAIT_S)
    assert starting.returncode == 130
    assert "Traceback" not in said
    assert traces.wait_until(lambda: not step.exists(), WAIT_S, 0.05) is not None
    assert not (tmp_path / "folder" / "token").exists()


@pytest.mark.parametrize("below", ["/proc/jobs", "FILE/jobs"])
def test_a_folder_that_cannot_be_written_is_an_error_in_one_line(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    folder = below.replace("FILE", str(tmp_path / "sbatch"))
    assert main(["slurm", "submit", "--folder", folder, "--", "true"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"alchemist: JobError: cannot write to the job's folder {folder}: ")
    monkeypatch.setenv(batch_job.FOLDER_VARIABLE, folder)
    assert main(["slurm", "start"]) == 1
    assert f"cannot write to the job's folder {folder}" in capsys.readouterr().err


def test_slurm_does_not_read_the_name_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would fill in %j there, and end the name at a space."""
    folder = tmp_path / "50% of 7"
    words = ["submit", "--dry-run", "-t", "2", "--folder", str(folder), "--", "true"]
    assert main(["slurm", *words]) == 0
    said = capsys.readouterr()
    assert f'#SBATCH --output="{tmp_path}/50%% of 7/log-%j.txt"\n' in said.out
    assert "warning: of -t 2 the program has" in said.err
    assert main(["slurm", "submit", "--dry-run", "--name", "../a b", "--", "true"]) == 0
    (home,) = re.findall("output=(.*)/[^/]*-..-a-b-[0-9]+/log-%j.txt", capsys.readouterr().out)
    assert home == str(JobFolder.home())
    assert main(["pbs", *words]) == 0
    assert f'#PBS -o "{folder}/log.txt"\n' in capsys.readouterr().out
