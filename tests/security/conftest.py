"""Folders for sockets, and programs that run as another user of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import ranks

ROOT = Path(__file__).resolve().parents[2]
OTHER_UID = 65534  # nobody

# The interpreter may be in a folder that the other user cannot enter: it starts as root.
BECOME_OTHER_USER = f"""
import os, socket, sys
os.setgroups([])
os.setresgid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
os.setresuid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
"""

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="sec-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def host() -> Iterator[ranks.Host]:
    """A rank behind its listeners."""
    with ranks.Host(1) as host:
        yield host
        assert host.unhandled() == []


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a program prints."""
    return process.stdout.readline().rstrip()


@pytest.fixture
def other_user() -> Iterator[Spawn]:
    """Starts a Python program, given as text, as another user: ``spawn(program, *args)``."""
    if os.geteuid() != 0:
        pytest.skip("only root can start processes of another user")
    started: list[subprocess.Popen[str]] = []

    def spawn(program: str, *args: str, fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", BECOME_OTHER_USER + program, *args], pass_fds=fds, cwd="/",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield spawn
    for process in started:
        process.kill()
        process.communicate()
