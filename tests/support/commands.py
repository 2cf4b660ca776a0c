"""Commands that tests run in processes of their own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
READY = "ready"  # the first line of `rest`
ALCHEMIST = (sys.executable, "-m", "alchemist_ray.cli")


def run(
    *words: Any,
    limit_s: float = 100.0,
    env: Mapping[str, str] = os.environ,
    cwd: Path | str | None = None,
    given: str = "",
    code: int | None = None,
    merged: bool = False,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `more` in its environment.

    `merged`: its errors are in its output. Raises `RuntimeError` with all that it printed if it
    ends with another exit code than `code`; None: with any.
    """
    done = subprocess.run(
        list(map(str, words)), env={**env, **more}, cwd=cwd, input=given, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE, text=True, timeout=limit_s,
        check=False,
    )  # fmt: skip
    if code not in (None, done.returncode):
        said = (done.stdout + (done.stderr or ""))[-6000:]
        raise RuntimeError(f"{' '.join(map(str, words))[:1000]} ({done.returncode}):\n{said}")
    return done


def output(*words: Any, code: int | None = 0, **options: Any) -> str:
    """The output of a command that must end with this exit code, see `run`."""
    return run(*words, code=code, **options).stdout


def python(program: str, *words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in Python, see `run`."""
    return run(sys.executable, "-c", textwrap.dedent(program), *words, **options)


def alchemist(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command `alchemist`, see `run`."""
    return run(*ALCHEMIST, *words, **options)


# --- systems of several processes ---


class System:
    """A context manager that starts processes, and ends them also if they do not come up."""

    def start(self) -> None:
        """Start all of it."""
        raise NotImplementedError

    def close(self) -> None:
        """End all of it, as far as it was started."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def die_with_parent() -> None:
    """For `subprocess.Popen(preexec_fn=...)`: a process that is killed when this one ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def unshared(
    namespaces: Sequence[str], module: str, *words: Any, **options: Any
) -> tuple[subprocess.Popen[str], int]:
    """Run a module as the first process of namespaces until it says `READY`: unshare, and its id.

    All that is in them ends with this process. Raises `RuntimeError` with what it says instead.
    """
    first = [*namespaces, "--fork", "--kill-child", sys.executable, "-S", "-m", module, *words]
    process = subprocess.Popen(
        ["unshare", *map(str, first)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        text=True, preexec_fn=die_with_parent, **options,
    )  # fmt: skip
    assert process.stdout is not None
    if (said := process.stdout.readline().strip()) != READY:
        process.kill()
        process.communicate()
        raise RuntimeError(f"the namespaces of {module} did not come up: {said}")
    return process, children(process.pid)[0]


def children(pid: int) -> list[int]:
    """The processes that a process has started; none if it has ended."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def rest() -> None:
    """Do nothing but reap children, as the first process of a namespace must."""
    print(READY, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.2)
