"""A gang that is published is found by its name in other jobs of its user."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path

import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster import published
from alchemist_ray.errors import SessionError
from alchemist_ray.gateway.server.actor import GatewayInfo
from tests.support import commands

PROGRAM = """
from alchemist_ray import AlchemistSession
with AlchemistSession.attach("shots") as als:
    print(als.run(lambda comm: comm.size), als.connection.transport.token != "")
"""


def in_another_job(home: Path, job: str) -> subprocess.CompletedProcess[str]:
    environment = {"HOME": str(home), "SLURM_JOB_ID": job, "RAY_ADDRESS": "", "ALCHEMIST_JOBS": "/"}
    return commands.python(textwrap.dedent(PROGRAM), **environment)


def test_another_job_attaches_without_address_and_token(
    gateway: GatewayInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with AlchemistSession(2, name="shots", lifetime="detached") as als:
        file = als.publish()
        assert file == published.path_of("shots")
        assert file.stat().st_mode & 0o777 == 0o600
        assert json.loads(file.read_text())["address"] == gateway.address
        done = in_another_job(tmp_path, "2")
        assert done.stdout.split() == ["2", "True"], done.stderr
        with AlchemistSession.attach("shots") as same_job:  # through Ray
            assert same_job.connection.transport.token == ""
        AlchemistSession.stop_gang("shots")
    assert "another job has published gang shots, and has perhaps ended" in (
        in_another_job(tmp_path, "2").stderr
    )


def test_a_job_that_has_ended_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    published.publish("shots", "alchemist://127.0.0.1:9?tls=off", "alch_a1_b2")
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    with pytest.raises(SessionError, match="published gang shots, and has perhaps ended"):
        AlchemistSession.attach("shots")
    published.path_of("shots").write_text("{}")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(SessionError) as told:
        AlchemistSession.attach("shots")
    assert "published" not in str(told.value)
