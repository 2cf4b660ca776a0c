"""Rothauge et al. (2019), Figure 3: the Python session, its printed output, its values checked."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.papers.experiment import BLUE, Page, Sample, Setting

LISTING, LIBRARY = (Path(__file__).with_name(name) for name in ("listing.py", "testlib.py"))
RANK = 10
PRINTED = (499.94743707, 18.02332952, 18.00250995, 17.88638836, 17.87153586, 17.80349282,
           17.79553406, 17.68237142, 17.59636937, 17.57955054)  # fmt: skip
NEAR = 0.03  # of another random matrix's values, relative
TOLERANCE = 1e-8
HOST = re.compile(r"\b\d+\.\d+\.\d+\.\d+\b")
HERE = f"{Path(__file__).parents[2]}/"


def run(setting: Setting) -> Page:
    """Run the listing several times; its output, and its singular values beside NumPy's."""
    page = Page(
        "session",
        "Rothauge et al. 2019, Figure 3: the Python session",
        "the paper's own size, 1000 x 1000 on 3 ranks, at every scale",
    )
    port = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
    given = {"PORT": port, "testlib_path": str(LIBRARY), "rank": RANK}
    seconds, errors = [], []
    for _ in range(setting.runs):
        printed = io.StringIO()
        begun = time.perf_counter()
        with contextlib.redirect_stdout(printed):
            found = runpy.run_path(str(LISTING), given)
        seconds.append(time.perf_counter() - begun)
        S = np.flipud(found["S"]).ravel()
        exact = np.linalg.svd(found["A"], compute_uv=False)[:RANK]
        errors.append(float(np.abs(S - exact).max() / exact[0]))
    page.data = {
        "seconds": seconds, "relative_errors": errors, "S": S.tolist(), "NumPy": exact.tolist(),
        "printed": _portable(printed.getvalue()),
    }  # fmt: skip
    fill(page)
    return page


def fill(page: Page) -> None:
    """Table, output, verdict and figure of what the page has."""
    errors, S = page.data["relative_errors"], page.data["S"]
    apart = [100 * (mine / papers - 1) for mine, papers in zip(S, PRINTED, strict=True)]
    add = page.table("singular value", "here, last run", "NumPy, the same matrix", "the paper")
    for i, (mine, exact, papers) in enumerate(zip(S, page.data["NumPy"], PRINTED, strict=True), 1):
        add(i, f"{mine:.8f}", f"{exact:.8f}", f"{papers:.8f}")
    took = Sample(page.data["seconds"])
    page.notes += [
        f"The whole listing with start and end of the gang: {took} s. Its output in the last run:",
        f"```text\n{page.data['printed']}\n```",
    ]
    most = max(map(abs, apart))
    page.conclude(
        most < 100 * NEAR and max(errors) < TOLERANCE,
        "the listing runs call by call and prints such singular values", "2019, Figure 3",
        f"its values differ from NumPy's by at most {max(errors):.0e} of the largest, and each of "
        f"the ten by at most {most:.1f} % from the figure's, of another random matrix",
    )  # fmt: skip
    page.draw = lambda figure: _draw(figure, apart)


def _draw(figure: Any, apart: list[float]) -> None:
    axes = figure.subplots()
    axes.bar(range(1, RANK + 1), apart, 0.6, color=BLUE)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(1, RANK + 1))
    axes.set_xlabel("number of the singular value")
    axes.set_ylabel("difference from the paper's, %\n(another random matrix)")


def _portable(output: str) -> str:
    """The output without what belongs to this machine."""
    return (
        HOST.sub("10.0.0.1", output)
        .replace(HERE, "")
        .replace(f" on {os.uname().nodename} ", " on node ")
        .rstrip()
    )
