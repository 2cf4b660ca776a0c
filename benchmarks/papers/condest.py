"""Gittens et al. (2018): the condition number by the wrapper ``CondEst(alA)`` of a Spark program.

`CondEst.scala` is compiled and submitted as a user's program; the same matrices are sent from
NumPy too. Their condition number is known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import TransferError
from benchmarks.papers.experiment import BLUE, ORANGE, Page, Sample, Setting, draw_bars, repeated
from benchmarks.papers.phases import Phases, measured, stored
from benchmarks.papers.spark import missing

PROGRAM = Path(__file__).with_name("CondEst.scala")
SIDES = {"small": (500, 1000, 2000), "node": (2000, 4000, 8000), "cluster": (2000, 8000, 16000)}
COND = 1e6
TOLERANCE = 1e-6  # relative, of the condition number
COMPILE_LIMIT_S, RUN_LIMIT_S = 300.0, 1800.0


def run(setting: Setting) -> Page:
    """The wrapper in a Scala program; the routine from NumPy; NumPy's own."""
    sides = [max(2, round(n / (setting.divide or 1) ** 0.5)) for n in SIDES[setting.scale]]
    ranks = setting.cores
    page = Page(
        "condest",
        "Gittens et al. 2018: the wrapper CondEst",
        f"the paper prints no size; square matrices with singular values from 1 to {1 / COND:g}, "
        f"{ranks} ranks",
    )
    ours: list[Phases] = []
    estimates: list[Sample] = []
    numpys: list[Sample] = []
    errors: list[float] = []
    with AlchemistSession(ranks, progress=False) as als:
        condest = als.load_library("linalg").condest
        for n in sides:
            A = matrix(n)
            found: list[float] = []
            ours.append(
                measured(
                    lambda: [als.send_matrix(A)],  # noqa: B023
                    lambda a: found.append(condest(a, ord="2")),  # noqa: B023
                    lambda _: None,
                    setting.runs,
                )
            )
            errors += [abs(cond / COND - 1) for cond in found]
            handle = als.send_matrix(A)
            estimates.append(repeated(lambda: condest(handle), setting.runs))  # noqa: B023
            handle.free()
            numpys.append(repeated(lambda: np.linalg.cond(A), setting.runs))  # noqa: B023
    reason = missing(setting)
    scala = _scala(sides, ranks, setting.runs) if reason is None else reason
    page.data = {
        "sides": sides, "from_numpy": ours, "estimate": estimates, "numpy": numpys,
        "relative_errors": errors,
        "scala": scala if isinstance(scala, str) else {n: scala[n][:2] for n in sides},
    }  # fmt: skip
    if not isinstance(scala, str):
        errors += [abs(cond / COND - 1) for n in sides for cond in scala[n][2]]
    fill(page)
    return page


def fill(page: Page) -> None:
    """Table, verdict and figure of the times that the page has."""
    sides, errors, found = (page.data[key] for key in ("sides", "relative_errors", "scala"))
    ours = list(map(stored, page.data["from_numpy"]))
    estimates, numpys = ([Sample(s) for s in page.data[key]] for key in ("estimate", "numpy"))
    scala = found if isinstance(found, str) else [list(map(Sample, its)) for its in found.values()]
    add = page.table(
        "n x n", "CondEst(alA) in Scala: send / compute, s", "from NumPy: send / compute, s",
        'by estimate, ord="1": compute, s', "numpy.linalg.cond, s",
    )  # fmt: skip
    for i, n in enumerate(sides):
        theirs = scala if isinstance(scala, str) else f"{scala[i][0]} / {scala[i][1]}"
        mine = f"{ours[i].send} / {ours[i].compute}"
        add(f"{n} x {n}", theirs, mine, estimates[i], numpys[i])
    claim = "a Spark program gets a condition number by a call of a wrapper object"
    if isinstance(scala, str):
        page.conclude(None, claim, "2018, III-D", f"the Scala program did not run: {scala}")
    else:
        page.conclude(
            max(errors) < TOLERANCE,
            claim,
            "2018, III-D",
            f"the Scala program compiles, runs, and its numbers differ from the known one by at "
            f"most {max(errors):.0e} of it",
        )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        series: dict[str, list[float | str]] = {
            "from NumPy": [its.total / numpy.mean for its, numpy in zip(ours, numpys, strict=True)],
            "CondEst(alA) in Scala": ["no time"] * len(sides) if isinstance(scala, str) else [
                (send.mean + compute.mean) / numpy.mean
                for (send, compute), numpy in zip(scala, numpys, strict=True)
            ],
        }  # fmt: skip
        draw_bars(axes, [f"{n} x {n}" for n in sides], series, (BLUE, ORANGE))
        axes.set_ylabel("time with transfers / numpy.linalg.cond")
        axes.legend(frameon=False)

    page.draw = draw


def matrix(n: int) -> Any:
    """A symmetric matrix with condition number `COND`; `CondEst.scala` makes the same one."""
    d = COND ** -(np.arange(n) / (n - 1))
    return np.diag(d) - 2 / n * np.add.outer(d, d) + 4 / n * d.mean()


def _scala(
    sides: list[int], ranks: int, runs: int
) -> dict[int, tuple[Sample, Sample, list[float]]] | str:
    """Send and compute seconds, and the numbers, by side; or why there are none."""
    import pyspark

    from alchemist_ray.clients.spark import jvm

    try:
        jar = jvm.build()
    except TransferError as reason:
        return str(reason)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.jar"
        compiler = ["java", "-cp", f"{jvm.SPARK_JARS}/*:{jar}", "scala.tools.nsc.Main"]
        compiled = _finished(
            [*compiler, "-usejavacp", "-d", str(program), str(PROGRAM)], COMPILE_LIMIT_S
        )
        if compiled.returncode:
            return (compiled.stdout + compiled.stderr)[:200]
        settings = {
            "spark.alchemist.python": sys.executable,
            "spark.ui.enabled": "false",
            "spark.log.level": "OFF",
        }
        confs = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
        submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
        done = _finished(
            [
                str(submit), "--master", f"local[{ranks}]", "--driver-memory", "4g", *confs,
                "--jars", str(jar), "--class", "CondEstTimes", str(program),
                *map(str, (ranks, runs, *sides)),
            ],
            RUN_LIMIT_S,
        )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"n"')]
    if done.returncode or len(lines) != len(sides) * (runs + 1):
        return ((done.stderr.strip().splitlines() or ["no message"])[-1])[:200]
    found = {}
    for n in sides:
        mine = [line for line in lines if line["n"] == n][1:]  # the first one is not counted
        times = (Sample([line[key] for line in mine]) for key in ("send_s", "compute_s"))
        found[n] = (*times, [float(line["cond"]) for line in mine])
    return found


def _finished(words: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=limit_s, check=False
    )
