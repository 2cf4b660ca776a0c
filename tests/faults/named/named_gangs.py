"""Shared by the tests of named gangs: what exists, and another program."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster.actors import GROUP_PREFIX
from tests.support import traces

ROOT = Path(__file__).parents[3]
END_LIMIT_S = 5.0


def actors() -> set[str]:
    return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}


def managers() -> set[str]:
    return {name for name in actors() if name.startswith(GROUP_PREFIX)}


def gangs() -> dict[str, str]:
    return {gang.name: gang.state for gang in AlchemistSession.list()}


class Program:
    """A program of its own on the cluster, that prints one line when it is ready."""

    def __init__(self, text: str, **init: Any) -> None:
        address = ray.get_runtime_context().gcs_address
        begin = f"import ray\nray.init(address={address!r}, log_to_driver=False, **{init!r})\n"
        begin += "from alchemist_ray import AlchemistSession\nimport numpy as np, time\n"
        command = [sys.executable, "-X", "faulthandler", "-c", begin + textwrap.dedent(text)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.said = self.line()

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *failed: object) -> None:
        if any(failed):
            self.process.send_signal(signal.SIGABRT)  # faulthandler prints its stacks
            traces.wait_until(lambda: self.process.poll() is not None, END_LIMIT_S)
        self.kill()
        self.process.stdout.close()
