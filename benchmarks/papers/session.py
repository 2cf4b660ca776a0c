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

from benchmarks.papers.experiment import BLUE, GREY, Page, Sample, Setting

LISTING, LIBRARY = (Path(__file__).with_name(name) for name in ("listing.py", "testlib.py"))
RANK = 10
PRINTED = (499.947, 18.023, 18.0025, 17.886)  # the first four of the ten in the figure
NEAR = 0.02  # of another random matrix's values, relative
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
    add = page.table("singular value", "here, last run", "NumPy, the same matrix", "the paper")
    for i in range(RANK):
        papers = f"{PRINTED[i]:g}" if i < len(PRINTED) else "..."
        add(i + 1, f"{S[i]:.6f}", f"{exact[i]:.6f}", papers)
    took = Sample(seconds)
    page.notes += [
        "The figure prints ten values; the first four are repeated here.",
        f"The whole listing with start and end of the gang: {took} s. Its output in the last run:",
        f"```text\n{_portable(printed.getvalue())}\n```",
    ]
    page.data = {"seconds": seconds, "relative_errors": errors, "S": S.tolist()}
    alike = all(abs(S[i] / value - 1) < NEAR for i, value in enumerate(PRINTED))
    page.conclude(
        alike and max(errors) < TOLERANCE,
        "the listing of Figure 3 runs call by call and prints such singular values",
        f"its values differ from NumPy's by at most {max(errors):.0e} of the largest, and the "
        f"first four by at most {100 * NEAR:.0f} % from the figure's, of another random matrix",
    )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.semilogy(range(1, RANK + 1), S, "o-", color=BLUE, label="here")
        axes.semilogy(range(1, len(PRINTED) + 1), PRINTED, "x", color=GREY, label="the paper")
        axes.set_xlabel("number")
        axes.set_ylabel("singular value")
        axes.legend()

    page.draw = draw
    return page


def _portable(output: str) -> str:
    """The output without what belongs to this machine."""
    return (
        HOST.sub("10.0.0.1", output)
        .replace(HERE, "")
        .replace(f" on {os.uname().nodename} ", " on node ")
        .rstrip()
    )
