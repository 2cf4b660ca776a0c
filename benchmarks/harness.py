"""Common code of the benchmarks: ratios within one run, a table, JSON, a picture.

The machines are small and shared, so absolute times mean little. Each value
is measured alternately with its reference, and the ratio of the best turns of both
is reported; mean and spread of the turns are printed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy  # noqa: F401  # its BLAS is named
from threadpoolctl import threadpool_info

RESULTS = Path(__file__).parent / "results"
WITH_SPARK = "spark" in sys.argv[1:]  # Spark's rows take longer than all others
BLUE, ORANGE = "#3b7dd8", "#d8743b"


@dataclass(slots=True)
class Row:
    """One target of the design and what was measured.

    `target` is a bound on `measured`: at least it, or at most it where `at_most`.
    """

    what: str
    measured: float
    target: float
    at_most: bool
    unit: str  # "x <yardstick>", "s", "ms", "% of a core"
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    def cells(self) -> tuple[str, ...]:
        bound = f"{'≤' if self.at_most else '≥'} {self.target:g}"
        verdict = "met" if self.met else "**missed**"
        return self.what, f"{self.measured:.3g} {self.unit}", bound, verdict, self.detail


@dataclass(frozen=True, slots=True)
class Peer:
    """The time of one implementation of an operation; `ratio` is to the first implementation."""

    operation: str
    who: str
    compute_s: float
    end_to_end_s: float
    ratio: float

    def cells(self) -> tuple[str, ...]:
        numbers = (self.compute_s, self.end_to_end_s, self.ratio)
        return self.operation, self.who, *(f"{number:.3g}" for number in numbers)


@dataclass(slots=True)
class Report:
    """The rows of one benchmark, and the times of other implementations."""

    name: str
    rows: list[Row] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float | None = None  # what the benchmark took

    def add(
        self,
        what: str,
        measured: float,
        target: float,
        unit: str,
        *,
        at_most: bool = False,
        detail: str = "",
    ) -> None:
        row = Row(what, measured, target, at_most, unit, detail)
        self.rows.append(row)
        print(table_line(row.cells()), flush=True)

    def compare(
        self, operation: str, who: str, compute_s: float, end_to_end_s: float | None = None
    ) -> Peer:
        """Record the times of an implementation; the first of an operation is its reference."""
        whole_s = compute_s if end_to_end_s is None else end_to_end_s
        its = (peer.end_to_end_s for peer in self.peers if peer.operation == operation)
        peer = Peer(operation, who, compute_s, whole_s, whole_s / next(its, whole_s))
        self.peers.append(peer)
        print(table_line(peer.cells()), flush=True)
        return peer

    def table(self) -> str:
        head = ("what", "measured", "target", "", "detail")
        text = markdown(head, [row.cells() for row in self.rows])
        if self.peers:
            head = ("operation", "implementation", "compute, s", "with transfers, s", "x the first")
            order = list(dict.fromkeys(peer.operation for peer in self.peers))
            by_operation = sorted(self.peers, key=lambda peer: order.index(peer.operation))
            text += "\n" + markdown(head, [peer.cells() for peer in by_operation])
        return text + "".join(f"\n{note}\n" for note in self.notes)

    def save(self) -> None:
        """Write ``.json`` and ``.png``, and the table into ``.md``, in ``results/<name>``."""
        RESULTS.mkdir(exist_ok=True)
        machine: dict[str, Any] = {"cpus": os.cpu_count(), "python": platform.python_version()}
        machine |= {"blas": blas_kernels(), "seconds": self.seconds}
        told = {"name": self.name, "machine": machine, "rows": [asdict(row) for row in self.rows]}
        if self.peers:
            told["peers"] = [asdict(peer) for peer in self.peers]
        (RESULTS / f"{self.name}.json").write_text(json.dumps(told, indent=1) + "\n")
        heights = [0.6 + 0.45 * len(self.rows)]
        if self.peers:
            operations = {peer.operation for peer in self.peers}
            heights.append(0.6 + 0.3 * (len(self.peers) + len(operations)))

        def draw(figure: Any) -> None:
            panels = figure.subplots(len(heights), height_ratios=heights, squeeze=False)
            self._draw_targets(panels[0, 0])
            if self.peers:
                self._draw_peers(panels[1, 0])

        save_figure(draw, RESULTS / f"{self.name}.png", (8, sum(heights)))
        write_part(RESULTS / f"{self.name}.md", self.name, self.table())

    def _draw_targets(self, axes: Any) -> None:
        scores = [
            row.target / max(row.measured, row.target / 1000)
            if row.at_most
            else row.measured / row.target
            for row in self.rows
        ]
        colours = [BLUE if row.met else ORANGE for row in self.rows]
        axes.barh([row.what for row in self.rows], scores, color=colours)
        ratio_axis(axes)
        axes.invert_yaxis()
        axes.set_xlabel("times better than the target\n(right of the line: met)")
        axes.set_title(self.name)

    def _draw_peers(self, axes: Any) -> None:
        """Ratios, by operation: seconds of an empty call and of a product have no common axis."""
        labels: list[str] = []
        for operation in dict.fromkeys(peer.operation for peer in self.peers):
            labels.append(f"{operation}:")
            its = [peer for peer in self.peers if peer.operation == operation]
            for peer in its:
                for seconds, colour in ((peer.end_to_end_s, ORANGE), (peer.compute_s, BLUE)):
                    axes.barh(len(labels), seconds / its[0].end_to_end_s, color=colour)
                labels.append(peer.who)
        axes.set_yticks(range(len(labels)), labels)
        ratio_axis(axes)
        axes.set_ylim(len(labels), -1)
        axes.set_xlabel(
            "time, x the first implementation of the operation\n(orange: what transfers add)"
        )


def table_line(cells: Iterable[object]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown(head: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown, with the end of its last line."""
    return "".join(f"{table_line(cells)}\n" for cells in (head, ["---"] * len(head), *rows))


def save_figure(draw: Callable[[Any], None], path: Path, inches: tuple[float, float]) -> None:
    """Draw on a matplotlib figure and write it as a PNG."""
    figure = new_figure(inches)
    draw(figure)
    figure.savefig(path)


def new_figure(inches: tuple[float, float]) -> Any:
    """A figure of matplotlib that no window shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_part(page: Path, name: str, text: str) -> None:
    """Replace the text between the markers of a page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}{text}{end}{rest.partition(end)[2]}")


def ratio_axis(axes: Any) -> None:
    """A line at 1, and a logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator

    axes.axvline(1, color="black", lw=1)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def start_ray(cpus: int, store_bytes: int | None = None) -> None:
    """Start a Ray, which ends with this process."""
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        "local", num_cpus=cpus, include_dashboard=False, log_to_driver=False,
        object_store_memory=store_bytes,
    )  # fmt: skip


def alone(run: Callable[[], Report], cpus: int = 8, store_bytes: int | None = None) -> None:
    """A benchmark as a program of its own: start a Ray for it, run it, save its report."""
    start_ray(cpus, store_bytes)
    run_and_save(run)


def run_and_save(run: Callable[[], Report]) -> None:
    """Run a benchmark and save its report, unless its peer is not installed."""
    begun = time.monotonic()
    report = run()
    report.seconds = time.monotonic() - begun
    if report.rows:
        report.save()
    print(f"{report.name} took {report.seconds:.0f} s", flush=True)


def use_peers() -> None:
    """Find peers that nothing else needs (`make peers`), and have them start the same MPI.

    They are in a folder of their own, which is put behind all others on the path of this process
    and its children.
    """
    folder = str(Path(__file__).parent.parent / "build" / "peers")
    if folder in sys.path:
        return
    sys.path.append(folder)
    for name, words in (
        ("PATH", [str(Path(sys.executable).parent), os.environ["PATH"]]),
        ("PYTHONPATH", [os.environ.get("PYTHONPATH", ""), folder]),
    ):
        os.environ[name] = os.pathsep.join(filter(None, words))


def printed(module: str, *words: object, limit_s: float) -> list[Any] | str:
    """The lines of JSON that a program of the benchmarks prints, or why there are none."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, words)], capture_output=True, text=True,
            timeout=limit_s, check=False, env={**os.environ, "RAY_ADDRESS": ""},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"took more than {limit_s:.0f} s"
    if done.returncode:
        return f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]:.100}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def blas_kernels() -> list[str]:
    """The kernels that the BLAS libraries of this process use, as ``openblas SkylakeX``."""
    found = [(lib["internal_api"], lib.get("architecture")) for lib in threadpool_info()]
    return sorted({f"{name} {kernel}" for name, kernel in found if kernel})


def timed(work: Callable[[], object]) -> float:
    """One run, in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def phases(
    send: Callable[[], Sequence[Any]],
    compute: Callable[..., Any],
    receive: Callable[[Any], object],
) -> tuple[float, float, float]:
    """The seconds of the three phases of a job, whose handles are freed.

    Parameters
    ----------
    send : callable() -> handles
    compute : callable(*handles) -> result or tuple of results
    receive : callable(handle)
        Called with each result that is a handle.
    """
    begun = time.perf_counter()
    sent = send()
    computing = time.perf_counter()
    results = compute(*sent)
    receiving = time.perf_counter()
    results = results if isinstance(results, tuple) else (results,)
    made = [result for result in results if hasattr(result, "free")]
    for result in made:
        receive(result)
    ended = time.perf_counter()
    for handle in (*sent, *made):
        handle.free()
    return computing - begun, receiving - computing, ended - receiving


def in_batches(work: Callable[[], object], count: int) -> list[list[float]]:
    """The times of six batches of runs, each sorted; the batch with the best median comes first."""
    batches = [sorted(timed(work) for _ in range(count)) for _ in range(6)]
    return sorted(batches, key=lambda times: times[count // 2])


class Time(float):
    """The best of several turns, in seconds, and all of them."""

    turns: tuple[float, ...]

    def __new__(cls, turns: Sequence[float]) -> Self:
        made = super().__new__(cls, min(turns))
        made.turns = tuple(turns)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Time, (self.turns,)

    def __str__(self) -> str:
        mean, spread = statistics.fmean(self.turns), statistics.pstdev(self.turns)
        return (
            f"best {float(self):.4g} s, mean {mean:.4g}, spread {spread:.2g} "
            f"({len(self.turns)} turns)"
        )


class Turns:
    """Collects the times of works that are measured in turns, so that noise meets them alike."""

    def __init__(self) -> None:
        self._found: defaultdict[Any, list[float]] = defaultdict(list)

    def add(self, name: Any, *seconds: float) -> None:
        self._found[name] += seconds

    def times(self) -> dict[Any, Time]:
        """The time of each work; prints best, mean and spread."""
        found = {name: Time(turns) for name, turns in self._found.items()}
        for name, time_s in found.items():
            print(f"  {name if isinstance(name, str) else ', '.join(name)}: {time_s}", flush=True)
        return found


def in_turns(
    works: dict[str, Callable[[], object]],
    rounds: int = 7,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> dict[str, Time]:
    """The time of each work; what is done `before` and `after` each does not count."""
    turns = Turns()
    for _ in range(rounds):
        for name, work in works.items():
            before()
            turns.add(name, timed(work))
            after()
    return turns.times()
