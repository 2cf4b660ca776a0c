"""Rank side of test_programs.py."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from ali.executables.line_program import LineProgram
from ali.executables.stepped_program import SteppedProgram
from ali.interface import Context
from ali.run import Programs
from mpi_workers.failures import Interrupted
from mpi_workers.local import local_gang
from mpi_workers.rank.gang_view import GangView

ECHO = """
import sys, time
for line in sys.stdin:
    time.sleep(0.4 if line == "slow\\n" else 0)
    print(line.strip(), flush=True)
"""
LAST_ANSWER = """
import time
print("first", flush=True)
time.sleep(0.1)
print("last", flush=True)
"""


def late_answer(gang: GangView) -> list[str]:
    """Answers to questions after one whose wait was interrupted."""
    ctx = Context(gang, {})
    program = LineProgram([sys.executable, "-S", "-c", ECHO])
    try:
        local_gang.begin(1)
        threading.Timer(0.1, local_gang.interrupt, [1]).start()
        try:
            program.ask(ctx, "slow")
        except Interrupted:
            local_gang.begin(2)
            return [program.ask(ctx, "second"), program.ask(ctx, "third")]
        return ["not interrupted"]
    finally:
        program.close()


def last_answer(gang: GangView, *argv: str) -> list[object]:
    """Answers of a program that ends before its last answer is read; whether it runs."""
    ctx = Context(gang, {})
    program = SteppedProgram(ctx, argv or [sys.executable, "-S", "-c", LAST_ANSWER])
    answers: list[object] = [program.ask("one")]
    time.sleep(0.5)
    answers.append(program.ask("two"))
    running: list[bool] = gang.comm.allgather(program.running)  # while ranks may wait
    program.close()
    return [*answers, *running]


def scripts(gang: GangView, folder: str) -> str:
    """What two scripts wrote that import modules of the same names from their own folders."""
    out = Path(folder, "out")
    for name in ("one", "two"):
        own = Path(folder, name)
        (own / "package").mkdir(parents=True)
        (own / "package" / "__init__.py").touch()
        (own / "package" / "inner.py").write_text(f"NAME = {name!r}")
        (own / "helper.py").write_text(f"NAME = {name!r}")
        code = "import sys, helper, package.inner\n"
        code += "open(sys.argv[1], 'a').write(f'{helper.NAME} {package.inner.NAME} ')"
        task = {
            "kind": "script", "name": name, "path": str(own / "script.py"), "argv": [str(out)],
            "env": {}, "cwd": None, "cwd_needed": False, "code": [code.encode()],
        }  # fmt: skip
        Programs().run(gang, task, lambda which: which)
    return out.read_text()
