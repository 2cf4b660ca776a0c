"""Programs that run in pods, and what they tell."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kube.cluster import Cluster

PROGRAMS = Path(__file__).parent / "programs"


def text(name: str, **numbers: float) -> str:
    """A program of ``programs/``, with numbers in place of its names in capitals."""
    program = (PROGRAMS / f"{name}.py").read_text()
    for key, number in numbers.items():
        program = program.replace(key.upper(), repr(number))
    return program


class Program:
    """A program that goes on in a pod: what it has told so far, as it tells it."""

    def __init__(self, cluster: Cluster, process: subprocess.Popen[str]) -> None:
        self._cluster = cluster
        self.process = process
        self.said: list[str] = []
        self._told: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("TOLD "):
                _, name, value = line.split(" ", 2)
                self._told[name] = json.loads(value)

    def told(self, name: str, limit_s: float) -> Any:
        """The value that it reports under a name. Raises `AssertionError` with all its output."""

        def there() -> bool:
            if name not in self._told and self.process.poll() is not None:
                self._thread.join(5)
                assert name in self._told, f"it ended without {name!r}:\n{''.join(self.said)}"
            return name in self._told

        try:
            self._cluster.wait_for(f"the program tells {name!r}", there, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{''.join(self.said)}") from None
        return self._told[name]

    def end(self, limit_s: float) -> int:
        """Wait for its end: its exit code."""
        code = self.process.wait(limit_s)
        self._thread.join(5)
        return code


@contextmanager
def program(cluster: Cluster, namespace: str, name: str, **numbers: float) -> Iterator[Program]:
    """One that runs in the head pod of a namespace."""
    process = cluster.begin(namespace, text(name, **numbers))
    try:
        yield Program(cluster, process)
    finally:
        process.kill()
        process.wait()
