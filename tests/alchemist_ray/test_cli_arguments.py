"""Options of subcommands that are no number, or not greater than 0, are refused at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from alchemist_ray import cli

pytestmark = pytest.mark.timeout(60)

COMMANDS = [
    ["status", "--watch"],
    ["trace", "x", "--last"],
    ["bench", "hpc", "--seconds"],
    ["doctor", "--limit"],
    ["doctor", "--start-timeout"],
    ["token", "create", "u", "--days"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "--timeout" in done.stderr
    assert "it must be a finite number greater than 0" in done.stderr


def test_a_command_without_its_dashes_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["slurm", "submit", "-N", "3", "python", "app.py"])
    assert ended.value.code == 2
    assert "unrecognized arguments: python app.py: the command is given after --" in (
        capsys.readouterr().err
    )
