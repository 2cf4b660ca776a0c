"""Programs in Scala: the listing of the 2018 paper, compiled here and run by spark-submit."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands
from tests.support.sparks import SPARK

pytest.importorskip("pyspark", reason="needs alchemist-on-ray[spark]")

import pyspark

from alchemist_ray.clients.spark import jvm

pytestmark = SPARK

LISTING = Path(__file__).with_name("Paper.scala")
LIBRARY = '''
import numpy as np
from ali import Context, DistMatrix, linalg, routine

@routine("Q", "R")
def qr(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """The factors of A = Q R."""
    return linalg.qr(ctx, A)

@routine("condNum")
def condest(ctx: Context, A: DistMatrix) -> float:
    """Condition number, from the Gram matrix: the ranks have whole rows."""
    values = np.linalg.eigvalsh(ctx.comm.allreduce(A.local.T @ A.local))
    return float(np.sqrt(values[-1] / values[0]))
'''
TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def jar() -> Path:
    return jvm.build()


@pytest.fixture(scope="module")
def program(jar: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiled = tmp_path_factory.mktemp("scala") / "program.jar"
    words = ["java", "-cp", f"{jvm.SPARK_JARS}/*:{jar}", "scala.tools.nsc.Main", "-usejavacp"]
    commands.output(*words, "-d", compiled, LISTING, limit_s=TIMEOUT_S)
    return compiled


def submitted(program: Path, jar: Path, cluster: str, *args: str, **settings: str) -> Any:
    settings = {
        "spark.alchemist.python": sys.executable,
        "spark.ui.enabled": "false",
        "spark.log.level": "OFF",
        **settings,
    }
    confs = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
    env = {
        **os.environ,
        "RAY_ADDRESS": cluster,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(["", *sys.path]).strip(os.pathsep),
    }
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    return commands.run(
        submit, "--master", "local[2]", *confs, "--jars", jar, "--class", "Paper", program, *args,
        limit_s=TIMEOUT_S, env=env,
    )  # fmt: skip


def test_the_listing_of_the_paper(cluster: str, jar: Path, program: Path, tmp_path: Path) -> None:
    library = tmp_path / "liba.py"
    library.write_text(LIBRARY)
    done = submitted(program, jar, cluster, str(library))
    lines = [line for line in done.stdout.splitlines() if line.endswith((": true", ": false"))]
    assert len(lines) == 11, done.stdout + done.stderr
    assert all(line.endswith("true") for line in lines), lines
    assert done.returncode == 0, done.stderr


def test_a_python_without_alchemist_is_named(cluster: str, jar: Path, program: Path) -> None:
    none = shutil.which("false")
    done = submitted(program, jar, cluster, "", **{"spark.alchemist.python": str(none)})
    assert done.returncode != 0
    assert "set spark.alchemist.python to a Python that has it" in done.stderr
