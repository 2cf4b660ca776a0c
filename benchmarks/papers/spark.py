"""Spark on the same cores: whether it is there, and its runs as a program of its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from typing import Self

from benchmarks.harness import printed
from benchmarks.papers.experiment import Sample, Setting

PROGRAM = "benchmarks.papers.spark_program"
LIMIT_S = {"small": 25.0, "node": 900.0, "cluster": 1800.0}  # the paper's: 30 minutes
START_LIMIT_S = 300.0  # of the JVM and of the data


def missing(setting: Setting) -> str | None:
    """Why Spark cannot be measured; None: it can."""
    if not setting.spark:
        return "left out (`--no-spark`)"
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    if shutil.which("java") is None:
        return "there is no Java"
    return None


def missing_master(setting: Setting) -> str | None:
    """Why Spark alone cannot be measured: one machine is no peer of a cluster."""
    if setting.scale == "cluster" and setting.spark_master is None:
        return "no Spark cluster was given (`--spark-master`)"
    return None


def master(setting: Setting) -> str:
    """Where Spark alone runs."""
    return setting.spark_master or f"local[{setting.cores}]"


class Alone:
    """Spark's own times by growing size; larger sizes are left out after one that took too long."""

    def __init__(self, setting: Setting, *options: str, limit_s: float | None = None) -> None:
        self._setting = setting
        self._options = options
        self._limit_s = limit_s or LIMIT_S[setting.scale]
        self._over = missing(setting) or missing_master(setting)

    def times(self, what: str, *sizes: int) -> Sample | str:
        """The seconds of the runs that ended in time, or why there are none."""
        if self._over is not None:
            return self._over
        limit_s = self._limit_s
        options = ("--runs", self._setting.runs + 1, "--limit", limit_s, *self._options)
        found = printed(
            PROGRAM, what, *sizes, "--master", master(self._setting),
            *options, limit_s=START_LIMIT_S + limit_s,
        )  # fmt: skip
        if found == [None]:  # the program has ended itself in its first run
            found = f"took more than {limit_s:.0f} s"
        if isinstance(found, str):
            self._over = f"not run: a smaller size {found}"
            return found
        seconds = [value for value in found if value is not None]
        return Sample(seconds[1:] or seconds)  # the first one warms the JVM up


class Asked:
    """Spark as a program that computes when it is asked to, to be measured in turns with others.

    A context manager. It is started with the first question, and again after one that took more
    than the limit, which is not asked again.
    """

    def __init__(self, setting: Setting, what: str, *sizes: int, native: bool, limit_s: float):
        self._reason = missing(setting) or missing_master(setting)
        self._words = [sys.executable, "-m", PROGRAM, what, *map(str, sizes), "--asked",
                       "--master", master(setting), *(["--native"] if native else [])]  # fmt: skip
        self._limit_s = limit_s
        self._program: subprocess.Popen[str] | None = None
        self._over: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._program is not None:
            self._program.communicate()  # its input ends, so it does

    def seconds(self, values: int) -> float | str:
        """The seconds of a run with this number of values, or why there are none."""
        if reason := self._reason or self._over.get(values):
            return reason
        if self._program is None:
            self._program = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            self._answer(self._program, START_LIMIT_S)
        assert self._program.stdin is not None
        try:
            print(values, file=self._program.stdin, flush=True)
            return float(json.loads(self._answer(self._program, self._limit_s)))
        except (OSError, TimeoutError):
            self._program.communicate()
            self._program = None
            self._over[values] = f"took more than {self._limit_s:.0f} s"
            return self._over[values]

    @staticmethod
    def _answer(program: subprocess.Popen[str], limit_s: float) -> str:
        """A line of the program, which is killed if it takes too long."""
        assert program.stdout is not None
        timer = threading.Timer(limit_s, program.kill)
        timer.start()
        try:
            if line := program.stdout.readline():
                return line
        finally:
            timer.cancel()
        raise TimeoutError
