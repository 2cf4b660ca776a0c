"""``alchemist doctor``: the cluster to check, the checks, the report."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from alchemist_ray.attached.options import START_TIMEOUT_S
from alchemist_ray.cluster import ray_cluster
from alchemist_ray.cluster.batch_job import FOLDER_VARIABLE
from alchemist_ray.deploy.slurm import allocation, sites
from alchemist_ray.errors import AlchemistError, JobError
from alchemist_ray.observe.doctor import finding, node, probe, ranks
from alchemist_ray.observe.doctor.finding import BAD, INFO, NOTHING, OK, WARN, Finding, named
from alchemist_ray.observe.doctor.node import (
    auth_mode,
    running_modes,
    token_path,
    usable_cores,
)
from alchemist_ray.observe.doctor.probe import Probe, RayProbes, StepProbes
from alchemist_ray.subcommands import parser_of, positive

JOIN = "start Ray (`ray start --head`, `alchemist slurm start`), or set --address"


def authentication() -> Iterator[Finding]:
    """Check this process's authentication with Ray."""
    path, mode = token_path(), auth_mode()
    if mode != "token" and running_modes() == {"token"}:
        yield Finding(
            BAD, f"mode {mode}, but the Ray that runs here requires its token",
            "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the cluster's token",
        )  # fmt: skip
    elif mode != "token":
        yield Finding(
            WARN,
            f"mode {mode}: anyone who can connect to Ray's ports runs code as this user",
            "set RAY_AUTH_MODE=token (Ray 2.52 or later) before Ray starts and in every client; "
            "harmless only if no other user can log in or connect",
        )  # fmt: skip
    elif os.environ.get("RAY_AUTH_TOKEN"):
        yield Finding(OK, "mode token, from RAY_AUTH_TOKEN")
    elif path.is_file():
        yield Finding(OK, f"mode token, from {path}")
    else:
        yield Finding(
            BAD, f"mode token, but there is no file {path}",
            "set RAY_AUTH_TOKEN_PATH to the cluster's token (in a job of `alchemist slurm`: in the "
            "job's folder), or RAY_AUTH_MODE=disabled if the cluster has none",
        )  # fmt: skip


def named_address(given: str | None) -> tuple[str, str]:
    """Return the configured address of a cluster and its source, or two empty strings."""
    if given:
        return given, "--address"
    if told := os.environ.get("RAY_ADDRESS"):
        return told, "this job's folder" if FOLDER_VARIABLE in os.environ else "RAY_ADDRESS"
    return "", ""


def join(given: str | None, *, start: bool) -> Finding:
    """Join the configured cluster, or the one on this machine; else `start` a small one.

    A failure is a `bad` finding, and Ray is not initialized afterwards.
    """
    address, by = named_address(given)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        found = ray_cluster.own_head() if address in ("", "auto") else address
        if found:
            ray_cluster.check(found, f"the cluster at {found}")
            ray.init(address=found, **quiet)
            at = ray.get_runtime_context().gcs_address
            return Finding(OK, f"{at} ({by or 'runs here'})")
        if start:
            ray_cluster.start_ray(max(2, int(usable_cores())))
            return Finding(INFO, "no Ray runs here: one was started for these checks")
    except Exception as error:  # Ray raises many types
        words = str(error).strip().partition("\n")[0]
        advice = f"check that this Ray runs and that no firewall blocks this machine; or {JOIN}"
        return Finding(BAD, f"cannot be joined: {type(error).__name__}: {words}", advice)
    return Finding(INFO, f"this user runs no Ray here: {JOIN}")


USAGE = """\
Check every node for common problems of Ray and MPI, and print advice for each.

  alchemist doctor                          this machine, its Ray cluster or its Slurm job
  alchemist slurm run -- alchemist doctor   in a job: also Ray and gangs
  alchemist doctor --address 10.0.0.1:6379 --nodes 4
"""
EXAMINE_TIMEOUT_S = 40.0  # for a node to answer; the limits of its checks are shorter
DIAL_TIMEOUT_S = 25.0
THIS = "this program"


class Examination:
    """The findings so far, and the current stage, for a report if that stage hangs."""

    def __init__(self, options: argparse.Namespace) -> None:
        told = options.site or os.environ.get(sites.VARIABLE)
        self.site = sites.load(options.site) if told else NOTHING
        self.options = options
        self.findings: list[Finding] = []
        self.nodes: list[str] = []
        self.stage = "starting"
        # Ray's own output goes to stderr: it is not part of the report.
        sys.stdout.flush()
        self.out = os.dup(1)
        os.dup2(2, 1)

    def add(self, check: str, *findings: Finding) -> None:
        self.findings += named(check, findings)

    def run(self) -> None:
        """Check the job's nodes, Ray's nodes, or this one."""
        self.add("Ray authentication", *authentication())
        self.add("threads", *node.threads())
        names = self._job_without_ray()
        if names:
            self._in_job(names)
        else:
            self._on_ray()

    def _job_without_ray(self) -> list[str]:
        """Return the nodes of this Slurm job, if its Ray is not running."""
        if named_address(self.options.address)[0]:
            return []
        try:
            job = allocation.current(os.environ)
        except JobError:
            return []
        return [node.name for node in job.nodes] if job.uses_srun else []

    def _in_job(self, names: list[str]) -> None:
        how = "`alchemist slurm run -- alchemist doctor` starts one and checks gangs too"
        self.add("Ray address", Finding(INFO, f"no Ray runs in this job: {how}"))
        self.stage = "starting a step on every node"
        with contextlib.closing(StepProbes(names)) as probes:
            self._probed(probes)
            if not self.options.no_ranks:
                self.stage = "starting a step of MPI programs"
                self.findings += ranks.srun_world(probes, self.site, self.options.ranks_per_node)

    def _on_ray(self) -> None:
        asked = self.options
        self.stage = "joining Ray"
        self.add("Ray address", join(asked.address, start=not asked.no_ranks))
        try:
            if not ray.is_initialized():
                local = Probe()
                self.nodes = [local.name]
                self._examined({local.name: local.examine(self.site, self.nodes)})
                return
            with contextlib.closing(RayProbes()) as probes:
                answers = self._probed(probes)
            if asked.nodes is not None and len(self.nodes) < asked.nodes:
                self.add(
                    "nodes",
                    Finding(
                        BAD, f"Ray has {len(self.nodes)} of {asked.nodes} nodes",
                        "run `ray start --address=...` on the others; raylet.err on a node that "
                        "left shows the reason",
                    )
                )  # fmt: skip
            if not asked.no_ranks and probes.nodes:
                self.stage = "starting a gang over all nodes"
                well = {name: node for name, node in probes.nodes.items() if name in answers}
                here = [told["interfaces"].items() for told in answers.values()]
                names = {address: name for interfaces in here for name, address in interfaces}
                self.findings += ranks.examine(
                    well, asked.ranks_per_node, asked.launcher, self.site, asked.start_timeout,
                    names,
                )  # fmt: skip
        finally:
            ray.shutdown()

    def _probed(self, probes: RayProbes | StepProbes) -> dict[str, Any]:
        """Check every node, then the network between them; returns the nodes' answers."""
        self.nodes = list(probes.names)
        self.stage = "checking every node"
        answers = self._told(
            probes.ask("examine", self.site, self.nodes, limit_s=EXAMINE_TIMEOUT_S)
        )
        self._examined(answers, {THIS: node.versions()})
        if len(self.nodes) > 1:
            self.stage = "connecting every node with others"
            listeners = {name: told["listener"] for name, told in answers.items()}
            dialled = self._told(probes.ask("dial", listeners, limit_s=DIAL_TIMEOUT_S))
            self.findings += [*probe.reached(dialled), *probe.clocks(dialled)]
        return answers

    def _examined(
        self, answers: dict[str, Any], versions: Mapping[str, Mapping[str, str]] = {}
    ) -> None:
        """Add the findings of nodes, and compare their versions and these."""
        for told in answers.values():
            self.findings += told["findings"]
        those = {name: told["versions"] for name, told in answers.items()}
        self.findings += probe.same_versions({**those, **versions})

    def _told(self, answers: dict[str, Any]) -> dict[str, Any]:
        """Return the answers; add a finding for each node without one."""
        for name, answer in answers.items():
            if isinstance(answer, JobError):
                found = Finding(
                    BAD, str(answer),
                    "install this version of alchemist-on-ray there, for the same Python; check "
                    "that the node is up and its disk answers; see Ray's worker log there",
                    node=name, check="node"
                )  # fmt: skip
                if found not in self.findings:
                    self.add("node", found)
        return {name: a for name, a in answers.items() if not isinstance(a, JobError)}

    def show(self) -> None:
        render = finding.as_json if self.options.json else finding.table
        with os.fdopen(os.dup(self.out), "w") as out:
            out.write(render(list(self.findings), self.nodes))


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist doctor``. Returns 0, or 1 if a finding is bad."""
    options = parser_of("alchemist doctor", USAGE, OPTIONS).parse_args(argv[1:])
    examination = Examination(options)

    def give_up() -> None:
        """Report and exit if a stage exceeds even its own time limit."""
        late = Finding(
            BAD, f"still {examination.stage} after {options.limit:g} s",
            "this stage hangs; --limit gives it more time, --no-ranks skips gangs",
        )  # fmt: skip
        examination.add("doctor", late)
        examination.show()
        os._exit(1)

    watch = threading.Timer(options.limit, give_up)
    watch.daemon = True
    watch.start()
    try:
        examination.run()
    except AlchemistError as error:
        message = f"{examination.stage}: {type(error).__name__}: {error.args[0]}"
        examination.add("doctor", Finding(BAD, message, "see the message"))
    finally:
        watch.cancel()
    examination.show()
    os.dup2(examination.out, 1)
    os.close(examination.out)
    return int(finding.verdict(examination.findings) == BAD)


OPTIONS: tuple[tuple[Any, ...], ...] = (
    ("--address", str, "host:port of a Ray cluster (default: the one found)"),
    ("--nodes N", int, "expected number of nodes"),
    ("--site", str, "site file with expected settings, by name or path"),
    ("--json", False, "print JSON"),
    ("--no-ranks", False, "do not start a gang or Ray"),
    ("--ranks-per-node N", 2, "ranks to start (default: 2)"),
    ("--launcher", "auto", "launcher of the ranks (default: auto)"),
    ("--start-timeout SECONDS", positive,
     f"time limit of the gang's start (default: {START_TIMEOUT_S:g})",
     {"default": START_TIMEOUT_S}),
    ("--limit SECONDS", positive, "time limit of the whole run (default: 240)",
     {"default": 240.0}),
)  # fmt: skip
