"""``alchemist doctor``."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import ray

from alchemist_ray.deploy.slurm import allocation, sites
from alchemist_ray.errors import AlchemistError, JobError
from alchemist_ray.observe.doctor import compare, joining, machine, pmi, ranks, report, software
from alchemist_ray.observe.doctor.fanout import Fanout, Here, InStep, OnRay, Silent
from alchemist_ray.observe.doctor.finding import BAD, INFO, Expected, Finding, from_map

USAGE = """\
Looks at every node for what an MPI user trips over, and says what to do.

  alchemist doctor                          here; or the Ray cluster, or the Slurm job, one is in
  alchemist slurm run -- alchemist doctor   in a job: Ray and gangs too
  alchemist doctor --address 10.0.0.1:6379 --nodes 4
"""
POLL_INTERVAL_S = 40.0  # for a node to answer; its own limits are shorter
OPEN_S, DIAL_S = 15.0, 25.0
THIS = "this program"


class Examination:
    """What has been found so far, and what is being done: for the report if that hangs."""

    def __init__(self, options: argparse.Namespace) -> None:
        site = sites.load(options.site) if options.site or os.environ.get(sites.VARIABLE) else None
        self.expected = Expected.of(site)
        self.options = options
        self.findings: list[Finding] = []
        self.nodes: list[str] = []
        self.stage = "starting"
        # What Ray prints there is no part of the report.
        sys.stdout.flush()
        self.out = os.dup(1)
        os.dup2(2, 1)

    def add(self, findings: Iterable[Finding]) -> None:
        self.findings += findings

    def run(self) -> None:
        """Look at what there is: the job's nodes, Ray's nodes, or this one."""
        self.add([*joining.authentication(), *machine.threads()])
        names = self._job_without_ray()
        if names:
            self._in_job(names)
        else:
            self._on_ray()

    def _job_without_ray(self) -> list[str]:
        """The nodes of the Slurm job that this is in, if no Ray of it is up."""
        if joining.named_address(self.options.address)[0]:
            return []
        try:
            job = allocation.current(os.environ)
        except JobError:
            return []
        return [node.name for node in job.nodes] if job.uses_srun else []

    def _in_job(self, names: list[str]) -> None:
        self.add(
            [
                Finding(
                    "Ray address", INFO,
                    "no Ray runs in this job: `alchemist slurm run -- alchemist doctor` brings one "
                    "up and looks at gangs, too",
                )
            ]
        )  # fmt: skip
        self.stage = "starting a step on every node"
        self._probed(lambda: InStep(names))
        if not self.options.no_ranks:
            self.stage = "starting a step of MPI programs"
            self.add(pmi.world(names, self.expected, self.options.ranks_per_node))

    def _on_ray(self) -> None:
        self.stage = "joining Ray"
        self.add(joining.join(self.options.address, start=not self.options.no_ranks))
        try:
            if not ray.is_initialized():
                self._probed(Here)
                return
            answers, nodes = self._probed(OnRay)
            self._count(len(self.nodes))
            if not self.options.no_ranks and nodes:
                self.stage = "starting a gang over all nodes"
                names = {
                    address: interface
                    for told in answers.values()
                    for interface, address in told["interfaces"].items()
                }
                well = {name: node for name, node in nodes.items() if name in answers}
                self.add(
                    ranks.examine(
                        well, self.options.ranks_per_node, self.options.launcher, self.expected,
                        self.options.start_timeout, names,
                    )
                )  # fmt: skip
        finally:
            ray.shutdown()

    def _count(self, there: int) -> None:
        wanted = self.options.nodes
        if wanted is not None and there < wanted:
            self.add(
                [
                    Finding(
                        "nodes", BAD, f"Ray has {there} of {wanted} nodes",
                        "`ray start --address=...` on the others; their raylet.err says why one "
                        "did not stay",
                    )
                ]
            )  # fmt: skip

    def _probed(self, make: Callable[[], Fanout]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Look at every node, then between them; the answers, and Ray's nodes, if they are."""
        probes = make()
        self.nodes = list(probes.names)
        try:
            self.stage = "looking at every node"
            expected = asdict(self.expected)
            answers = self._told(
                probes.ask("look", expected, len(self.nodes), limit_s=POLL_INTERVAL_S)
            )
            for told in answers.values():
                self.add(from_map(told["findings"]))
            versions = {name: told["versions"] for name, told in answers.items()}
            if not isinstance(probes, Here):
                versions[THIS] = software.versions()
            self.add(compare.same_versions(versions))
            if len(self.nodes) > 1:
                self.stage = "connecting every node with others"
                rank_endpoints = self._told(
                    probes.ask("open", expected, self.nodes, limit_s=OPEN_S)
                )
                dialled = self._told(probes.ask("dial", rank_endpoints, limit_s=DIAL_S))
                self.add([*compare.reached(dialled), *compare.clocks(dialled)])
        finally:
            probes.close()
        return answers, getattr(probes, "nodes", {})

    def _told(self, answers: dict[str, Any]) -> dict[str, Any]:
        """The answers of those that answered; a finding for each of the others."""
        for name, answer in answers.items():
            if isinstance(answer, Silent):
                finding = Finding(
                    "node", BAD, answer.why,
                    "is alchemist-on-ray of this version installed there, in the same Python? Does "
                    "the node live, and its disk answer? Ray's worker log there says more",
                    where=name,
                )  # fmt: skip
                self.add([] if finding in self.findings else [finding])
        return {name: a for name, a in answers.items() if not isinstance(a, Silent)}


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist doctor``: 0, or 1 if something is bad."""
    options = _parser().parse_args(argv)
    try:
        examination = Examination(options)
    except AlchemistError as error:
        sys.stderr.write(f"alchemist: {type(error).__name__}: {error}\n")
        return 1

    def give_up() -> None:
        """Where even the limits of the parts did not help: say what there is, and leave."""
        examination.add(
            [
                Finding(
                    "doctor", BAD, f"still {examination.stage} after {options.limit:g} s",
                    "that is what hangs; --limit gives it more time, --no-ranks leaves gangs out",
                )
            ]
        )  # fmt: skip
        _show(examination)
        os._exit(1)

    watch = threading.Timer(options.limit, give_up)
    watch.daemon = True
    watch.start()
    try:
        examination.run()
    except AlchemistError as error:
        examination.add([_failed(examination, error)])
    finally:
        watch.cancel()
    _show(examination)
    os.dup2(examination.out, 1)
    os.close(examination.out)
    return report.exit_code(examination.findings)


def _failed(examination: Examination, error: AlchemistError) -> Finding:
    said = f"{examination.stage}: {type(error).__name__}: {error.args[0]}"
    return Finding("doctor", BAD, said, "see the message")


def _show(examination: Examination) -> None:
    render = report.as_json if examination.options.json else report.table
    text = render(list(examination.findings), examination.nodes)
    with os.fdopen(os.dup(examination.out), "w") as out:
        out.write(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist doctor",
        description=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--address", help="a Ray cluster's host:port (default: the one that is found)"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="how many nodes there must be")
    parser.add_argument("--site", help="site file, by name or path: what is expected")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--no-ranks", action="store_true", help="start no gang, and no Ray")
    parser.add_argument("--ranks-per-node", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--launcher", default="auto", help="as AlchemistSession's (default: auto)")
    parser.add_argument("--start-timeout", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument(
        "--limit", type=float, default=240.0, metavar="SECONDS", help="for all of it"
    )
    return parser
