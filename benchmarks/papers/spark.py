"""Spark on the same cores: whether it is there, and its runs as a program of its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from typing import Any

from benchmarks.papers.experiment import Sample, Setting

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


def _master(setting: Setting) -> str:
    return setting.spark_master or f"local[{setting.cores}]"


class Alone:
    """Spark's own times by growing size; larger sizes are left out after one that took too long."""

    def __init__(self, setting: Setting, *options: str) -> None:
        self._setting = setting
        self._options = options
        self._over = missing(setting) or missing_master(setting)

    def times(self, what: str, *sizes: int) -> Sample | str:
        """The seconds of the runs that ended in time, or why there are none."""
        if self._over is not None:
            return self._over
        limit_s = LIMIT_S[self._setting.scale]
        words = [what, *map(str, sizes), "--master", _master(self._setting), *self._options]
        found = _printed(words, self._setting.runs, limit_s)
        if isinstance(found, str):
            self._over = f"not run: a smaller size {found}"
        return found


def _printed(words: list[str], runs: int, limit_s: float) -> Sample | str:
    argv = [sys.executable, "-m", "benchmarks.papers.spark_program", *words]
    argv += ["--runs", str(runs + 1), "--limit", str(limit_s)]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=START_LIMIT_S + limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not end in {START_LIMIT_S + limit_s:.0f} s"
    lines: list[Any] = [json.loads(line) for line in done.stdout.split() if _is_time(line)]
    seconds = [value for value in lines if value is not None]
    if seconds:
        return Sample(seconds[1:] or seconds)  # the first one warms the JVM up
    if None in lines:
        return f"took more than {limit_s:.0f} s"
    return f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]:.100}"


def _is_time(line: str) -> bool:
    return line == "null" or line.replace(".", "", 1).replace("e-", "", 1).isdigit()
