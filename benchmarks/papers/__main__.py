"""``python -m benchmarks.papers [NAME ...]``: the experiments of the Alchemist papers."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import ray

from benchmarks.harness import markdown, start_ray
from benchmarks.papers.experiment import PAGES, SCALES, Page, Setting, cited

EXPERIMENTS = {
    name: import_module(f"benchmarks.papers.{name}")
    for name in (
        "session", "layouts", "factors", "table1", "svd_scaling", "transfer_shapes", "links",
        "condest", "cg_timit", "rl", "sandia", "guests", "spark_scales",
    )
}  # fmt: skip
LONG = ("guests", "spark_scales")  # each takes as long as all others: only if they are named
SHARED = 2  # Ray's CPUs for each core: ranks and Spark's executors share the cores of a machine


def main(argv: list[str] | None = None) -> int:
    """Run experiments and write their pages; 1 if one has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description="Repeat the experiments of the Alchemist papers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(EXPERIMENTS)}")
    parser.add_argument("--scale", choices=SCALES, default="small", help="sizes of the matrices")
    parser.add_argument("--runs", type=int, default=3, help="of each measurement")
    parser.add_argument("--divide", type=float, help="the paper's bytes by this number")
    parser.add_argument("--no-spark", action="store_true", help="leave Spark out")
    parser.add_argument("--spark-master", help="cluster of Spark alone, else this machine's cores")
    parser.add_argument("--address", help="Ray cluster to join; at scale cluster: auto")
    parser.add_argument(
        "--redraw", action="store_true", help="write pages and figures from the stored data"
    )
    parser.add_argument("--out", type=Path, default=PAGES, help="folder of the pages")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    if options.redraw:
        for name in options.names or EXPERIMENTS:
            redraw(name, options.out)
        (options.out / "claims.md").write_text(claims())
        return 0
    setting = Setting(
        options.scale, options.runs, options.divide, not options.no_spark, options.spark_master
    )
    address = options.address or ("auto" if options.scale == "cluster" else "local")
    if address == "local":
        cpus = max(4, SHARED * (os.cpu_count() or 1))  # the session's listing has 3 ranks
        start_ray(cpus)
    else:
        ray.init(address, log_to_driver=False)
    failed = []
    try:
        for name in options.names or [name for name in EXPERIMENTS if name not in LONG]:
            print(f"\n## {name}", flush=True)
            begun = time.monotonic()
            try:
                page = EXPERIMENTS[name].run(setting)
            except Exception:  # the other experiments do not depend on it
                traceback.print_exc()
                failed.append(name)
                continue
            if page.tables:
                page.save(setting, options.out)
            else:
                print(*page.notes)
            print(f"{name} took {time.monotonic() - begun:.0f} s", flush=True)
    finally:
        ray.shutdown()
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def claims() -> str:
    """The page of all claims of the papers, as the stored pages judge them."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name in EXPERIMENTS:
        for line in json.loads((PAGES / f"{name}.json").read_text())["verdicts"]:
            if (judged := Page.judged(line)) is not None:
                claim, where, said = judged
                found.setdefault((where, claim), {}).setdefault(said, []).append(name)
    rows = [
        (cited(where), claim, said.removeprefix("The paper's claim "),
         ", ".join(f"[{page}]({page}.md)" for page in dict.fromkeys(pages)))
        for (where, claim), verdicts in sorted(found.items())
        for said, pages in verdicts.items()
    ]  # fmt: skip
    return (
        "# The papers' claims, and what holds here\n\n"
        "Written by `python -m benchmarks.papers --redraw` from the stored pages, each of which "
        "states its rules and reasons.\n\n"
        + markdown(("section", "claim", "verdict here", "page"), rows)
    )


def redraw(name: str, out: Path) -> None:
    """Text, verdicts and figure of a page again, from the data that its run has stored."""
    page = Page.read(name)
    EXPERIMENTS[name].fill(page)
    page.save(Setting(page.stored["scale"] if page.stored else "small"), out)


if __name__ == "__main__":
    sys.exit(main())
