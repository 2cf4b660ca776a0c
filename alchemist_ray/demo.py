"""``alchemist demo``: a picture goes through a gang of MPI ranks and comes back as its modes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.errors import AlchemistError
from alchemist_ray.session.alchemist_session import AlchemistSession
from alchemist_ray.subcommands import parser_of

RANK = 100
SHOWN = (5, 25, 100)
TOLERANCE = 1e-9  # of the largest singular value


@contextmanager
def _step(what: str) -> Iterator[None]:
    print(f"\n* {what}", flush=True)
    start = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - start:.2f} s", flush=True)


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist demo``. Returns 0."""
    about = "Send an array to MPI ranks, compute its singular values there, and draw them."
    rows = (
        ("--workers", 4, "MPI ranks (default: 4)"),
        ("--out", "out", "folder for the picture (default: out)"),
    )
    asked = parser_of("alchemist demo", about, rows).parse_args(argv[1:])
    try:
        run(asked.workers, asked.out)
    except OSError as error:
        raise AlchemistError(f"--out {asked.out}: {error}") from None
    return 0


def run(workers: int = 4, out: str | Path = "out") -> Path:
    """Run the demo; returns the picture's path.

    Parameters
    ----------
    workers : int
        MPI ranks.
    out : path_like
        Folder for ``demo.png``; made if it is not there.

    Raises
    ------
    AlchemistError
        If the gang's factors differ from NumPy's.
    ModuleNotFoundError
        If the extra ``demo`` is not installed.
    """
    try:
        from skimage import data  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise AlchemistError(
            f"the demo needs {error.name}: pip install 'alchemist-on-ray[demo]'"
        ) from None
    start = time.perf_counter()
    image = data.hubble_deep_field()  # (872, 1000, 3), ships inside scikit-image
    m, n, channels = image.shape
    # Colours side by side: one matrix whose rows are the rows of the picture.
    A = (image / 255.0).transpose(0, 2, 1).reshape(m, channels * n)
    print(f"The Hubble deep field as a matrix: {m} x {channels * n}, {A.size:,} numbers")

    with _step(f"start Ray and a gang of {workers} MPI ranks"):
        als = AlchemistSession(workers, progress=True)
    with als:
        for worker in als.list_workers():
            print(f"  rank {worker.rank}: pid {worker.pid} on {worker.hostname}")
        with _step("send the matrix: every rank gets its rows (layout VC_STAR)"):
            handle = als.send_matrix(A, name="hubble", print_times=True)
            print(f"  {handle!r}")
        with _step(f"truncated SVD of rank {RANK} on the gang (ARPACK over MPI)"):
            linalg = als.load_library("linalg")
            S, U, V = linalg.truncated_svd(handle, rank=RANK)
        with _step("fetch the factors"):
            s, u, v = S.fetch(), U.fetch(), V.fetch(print_times=True)
    with _step("check them against NumPy"):
        _check(A, s, u, v)
    with _step("draw"):
        path = _draw(image, s, u, v, Path(out))
    print(f"\n{time.perf_counter() - start:.1f} s in all. The picture: {path}")
    return path


def _check(A: NDArray[Any], s: NDArray[Any], u: NDArray[Any], v: NDArray[Any]) -> None:
    exact = np.linalg.svd(A, compute_uv=False)
    off = np.abs(s - exact[: len(s)]).max() / exact[0]
    residual = np.linalg.norm(A - (u * s) @ v.T)
    best = np.sqrt(np.sum(exact[len(s) :] ** 2))
    print(f"  singular values differ by {off:.1e} of the largest")
    print(f"  ||A - U S V'|| = {residual:.6f}; the best possible is {best:.6f}")
    if off > TOLERANCE or abs(residual - best) > TOLERANCE * exact[0]:
        raise AlchemistError(
            "the factors of the gang are wrong: run alchemist doctor, which checks the MPI of this "
            "machine"
        )


def _draw(
    image: NDArray[Any], s: NDArray[Any], u: NDArray[Any], v: NDArray[Any], out: Path
) -> Path:
    import matplotlib as mpl  # noqa: PLC0415  (only the demo draws)

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    m, n, channels = image.shape
    with plt.style.context("dark_background"):
        figure = plt.figure(figsize=(15, 7.6), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=[1.3, 1])
        panels = halves[0].subplots(1, len(SHOWN) + 1)
        for axes, k in zip(panels, SHOWN, strict=False):
            low = ((u[:, :k] * s[:k]) @ v[:, :k].T).reshape(m, channels, n).transpose(0, 2, 1)
            axes.imshow((low.clip(0, 1) * 255).astype(np.uint8))
            kept = k * (m + channels * n + 1) / image.size
            axes.set_title(f"{k} singular vectors, {kept:.0%} of the numbers", fontsize=11)
        panels[-1].imshow(image)
        panels[-1].set_title("the original", fontsize=11)
        for axes in panels:
            axes.axis("off")
        left, right = halves[1].subplots(1, 2)
        left.set_title("singular values", fontsize=11)
        left.semilogy(np.arange(1, len(s) + 1), s, ".-", lw=1)
        left.grid(color="0.2")
        right.set_title("the first three right vectors (green)", fontsize=11)
        right.plot(v[n : 2 * n, :3] + 0.12 * (1 - np.arange(3)), lw=0.8)
        right.set_yticks([])
        figure.suptitle("Hubble deep field, truncated SVD on a gang of MPI ranks", fontsize=14)
        out.mkdir(parents=True, exist_ok=True)
        path = out / "demo.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
    return path
