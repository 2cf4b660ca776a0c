"""The command ``alchemist``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alchemist_ray import __version__, cli
from tests.support.commands import alchemist, run

NUMBERS = [  # options that are numbers greater than 0
    ["status", "--watch"],
    ["trace", "x", "--last"],
    ["bench", "hpc", "--seconds"],
    ["doctor", "--limit"],
    ["doctor", "--start-timeout"],
    ["token", "create", "u", "--days"],
]


def test_it_tells_its_version_and_its_usage() -> None:
    assert alchemist("--version").stdout.strip() == __version__
    assert "demo" in alchemist("juggle", code=2).stderr


@pytest.mark.parametrize("words", [("slurm", "submit"), ("slurm", "run"), ("pbs", "submit")])
def test_usage_shows_where_the_program_goes(words: tuple[str, ...]) -> None:
    line, *_ = alchemist(*words, "--help").stdout.splitlines()
    assert line == f"usage: alchemist {' '.join(words)} [options] -- COMMAND"


def test_the_demo_checks_itself_and_draws(cluster: str, tmp_path: Path) -> None:
    pytest.importorskip("skimage", reason="the extra `demo` is not installed")
    words = ("demo", "--workers", "3", "--out", tmp_path)
    done = alchemist(*words, code=0, RAY_ADDRESS=cluster)
    assert (tmp_path / "demo.png").stat().st_size > 100_000
    assert "2,616,000 numbers" in done.stdout
    assert done.stdout.count("Data transfer times breakdown") == 2
    assert "the best possible" in done.stdout
    assert "100%" in done.stderr  # the progress bar


def test_an_error_of_the_tree_is_a_line_and_a_one(cluster: str) -> None:
    done = alchemist("demo", "--workers", "1000", code=1, RAY_ADDRESS=cluster)
    # Ray writes to the same stderr, for instance that a disk is nearly full.
    lines = [line for line in done.stderr.splitlines() if line.startswith("alchemist: ")]
    assert [line.partition(" workers")[0] for line in lines] == ["alchemist: ResourceError: 1000"]
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        words = [sys.executable, "-m", "alchemist_ray.cli", "slurm", "sites"]
        done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("command", NUMBERS, ids=" ".join)
@pytest.mark.parametrize("value", ["nan", "x", "0", "inf"])
def test_a_number_greater_than_0(
    command: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, value])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{command[-1]}: must be a number greater than 0; got {value}" in said


@pytest.mark.parametrize("value", ["nan", "-5"])
def test_the_time_limit_of_a_routine_without_ray(value: str) -> None:
    command = [sys.executable, "-m", "ali", "run-routine", "--timeout", value, "echo", "who", "1"]
    done = run(*command, code=1)
    assert "--timeout" in done.stderr
    assert "it must be a finite number greater than 0" in done.stderr


def test_a_command_without_its_dashes_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["slurm", "submit", "-N", "3", "python", "app.py"])
    assert ended.value.code == 2
    assert "arguments: python app.py (COMMAND comes after --)" in capsys.readouterr().err
