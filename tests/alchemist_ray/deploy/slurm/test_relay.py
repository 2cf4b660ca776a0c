"""Commands that a supervisor runs for a process in an image: output, exit code, cancellation."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alchemist_ray.deploy.slurm import relay
from alchemist_ray.deploy.slurm.relay import OUTSIDE, VARIABLE, Relay
from mpi_workers.wire import sockets
from tests.support import traces
from tests.support.frames import Faulty

GONE_S = 10.0


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Any]:
    """Has a command relayed; the process that asks, with an environment as in an image."""
    path = str(tmp_path / "relay")
    relay = Relay(path)
    asking: list[subprocess.Popen[str]] = []

    def ask(*command: str, **variables: str) -> subprocess.Popen[str]:
        env = os.environ | {VARIABLE: path, "HOME": "/inside", "PATH": "/inside"}
        words = [sys.executable, "-m", "alchemist_ray.deploy.slurm.relay", *command]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        asking.append(subprocess.Popen(words, env=env | variables, text=True, **pipes))
        return asking[-1]

    yield ask
    relay.close()
    for process in asking:
        process.kill()
        process.communicate()


def test_output_and_exit_code_come_back(ask: Any) -> None:
    process = ask("sh", "-c", "echo $X $HOME; echo bad >&2; exit 7", X="given " + "x" * 100_000)
    out, err = process.communicate(timeout=30)
    assert out == f"given {'x' * 100_000} {os.environ['HOME']}\n"
    assert (err, process.returncode) == ("bad\n", 7)
    killed = ask("sh", "-c", "kill -9 $$")
    killed.communicate(timeout=30)
    assert killed.returncode == 128 + 9
    assert set(OUTSIDE) >= {"HOME", "PATH"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_ends_with_the_one_who_asked(ask: Any, number: signal.Signals) -> None:
    process = ask("sh", "-c", "trap 'echo told; exit 3' TERM; echo $$; while :; do sleep 0.1; done")
    pid = process.stdout.readline().strip()
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert traces.wait_until(lambda: not Path(f"/proc/{pid}").exists(), GONE_S, 0.05) is not None
    assert out == "told\n"
    if number == signal.SIGTERM:
        assert process.returncode == 3  # it has waited for the end


def test_a_command_that_cannot_start_says_why(ask: Any, tmp_path: Path) -> None:
    program = tmp_path / "srun"
    program.write_bytes(b"\0not a program")
    program.chmod(0o755)
    here = os.uname().nodename
    for command, path, code, said in (
        ("no-such-launcher", None, 127, f"no program no-such-launcher on {here}"),
        ("true", "", 127, f"{VARIABLE} is not set"),
        ("true", "/nowhere", 127, "no supervisor at /nowhere"),
        (str(program), None, 126, "Exec format error"),
    ):
        process = ask(command, **({} if path is None else {VARIABLE: path}))
        _, err = process.communicate(timeout=30)
        assert process.returncode == code
        assert said in err


def test_a_relay_without_file_descriptors_rests_and_then_serves(tmp_path: Path) -> None:
    served = Relay(str(tmp_path / "relay"))
    served.socket = faulty = Faulty(served.socket, [errno.EMFILE] * 5)
    # The thread that serves has the number of the socket, which stays.
    with socket.socket(socket.AF_UNIX) as caller:
        begun = time.monotonic()
        caller.connect(str(served.server_address))
        assert traces.wait_until(lambda: not faulty.errors, GONE_S, 0.01) is not None
        assert time.monotonic() - begun > 4 * sockets.EXHAUSTED_S
        asked = json.dumps({"argv": ["true"], "env": {}}) + "\n"
        socket.send_fds(caller, [asked.encode()], [1, 2])
        assert caller.recv(10) == b"0"
    served.close()


def test_an_answer_before_the_end_of_the_request_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Relay(str(tmp_path / "relay"))
    send = socket.send_fds

    def slowly(sock: socket.socket, *given: Any) -> int:
        sent = send(sock, *given)
        select.select([sock], [], [], GONE_S)  # the answer
        time.sleep(0.1)  # the end of the connection
        return sent

    monkeypatch.setattr(relay.socket, "send_fds", slowly)
    monkeypatch.setenv(VARIABLE, str(served.server_address))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert relay.main(["no-such-launcher"]) == 127
    finally:
        signal.signal(signal.SIGTERM, before)
        served.close()
