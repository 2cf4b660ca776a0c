"""``alchemist doctor``: the cluster to check, the checks, the report."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import ray

from alchemist_ray.deploy.slurm import allocation, sites
from alchemist_ray.errors import AlchemistError, JobError
from alchemist_ray.gang.options import START_TIMEOUT_S
from alchemist_ray.observe.doctor import finding, node, probe, ranks
from alchemist_ray.observe.doctor.finding import BAD, INFO, OK, WARN, Expected, Finding, from_map
from alchemist_ray.observe.doctor.node import auth_mode, token_path, usable_cores
from alchemist_ray.observe.doctor.probe import Fanout, LocalProbe, NoAnswer, RayProbes, StepProbes
from alchemist_ray.runtime.cluster import ray_cluster
from alchemist_ray.runtime.cluster.batch_job import FOLDER_VARIABLE
from alchemist_ray.subcommands import positive

CONNECT_TIMEOUT_S = 3.0
JOIN = "start Ray (`ray start --head`, `alchemist slurm start`), or set --address"


def authentication() -> Iterator[Finding]:
    """Check this process's authentication with Ray."""
    check = "Ray authentication"
    path, mode = token_path(), auth_mode()
    if mode != "token":
        yield Finding(
            WARN,
            f"mode {mode}: anyone who can connect to Ray's ports runs code as this user",
            "set RAY_AUTH_MODE=token (Ray 2.52 or later) before Ray starts and in every client; "
            "harmless only if no other user can log in or connect", check=check
        )  # fmt: skip
        return
    if os.environ.get("RAY_AUTH_TOKEN"):
        yield Finding(OK, "mode token, from RAY_AUTH_TOKEN", check=check)
    elif not path.is_file():
        yield Finding(
            BAD, f"mode token, but there is no file {path}",
            "set RAY_AUTH_TOKEN_PATH to the cluster's token (in a job of `alchemist slurm`: in the "
            "job's folder), or RAY_AUTH_MODE=disabled if the cluster has none", check=check
        )  # fmt: skip
    else:
        yield Finding(OK, f"mode token, from {path}", check=check)


def named_address(given: str | None) -> tuple[str, str]:
    """Return the configured address of a cluster and its source, or two empty strings."""
    if given:
        return given, "--address"
    if told := os.environ.get("RAY_ADDRESS"):
        return told, "this job's folder" if FOLDER_VARIABLE in os.environ else "RAY_ADDRESS"
    return "", ""


def answers(address: str) -> Iterator[Finding]:
    """Check that a process listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except ValueError:
        yield Finding(
            BAD, f"{address!r} is not an address",
            "give host:port, as in 10.0.0.1:6379", check="Ray address"
        )  # fmt: skip
    except OSError as error:
        yield Finding(
            BAD,
            f"no answer at {address}: {error.strerror or 'timeout after 3 s'}",
            f"check that this Ray runs and that no firewall blocks this machine; otherwise {JOIN}",
            check="Ray address"
        )  # fmt: skip


def join(given: str | None, *, start: bool) -> Iterator[Finding]:
    """Join the configured cluster, or the one on this machine; else `start` a small one.

    A failure is a `bad` finding, and Ray is not initialized afterwards.
    """
    check = "Ray address"
    address, by = named_address(given)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    plain = bool(address) and address != "auto" and "://" not in address
    if plain and (found := list(answers(address))):
        yield from found
        return
    found_here = ray_cluster.own_head() if address in ("", "auto") else address
    try:
        if found_here:
            ray_cluster.check(found_here, found_here)
            ray.init(address=found_here, **quiet)
            yield Finding(
                OK, f"{ray.get_runtime_context().gcs_address} ({by or 'runs here'})", check=check
            )
        elif start:
            ray_cluster.start_ray(max(2, int(usable_cores())))
            yield Finding(INFO, "no Ray runs here: one was started for these checks", check=check)
        else:
            yield Finding(INFO, f"this user runs no Ray here: {JOIN}", check=check)
    except Exception as error:  # Ray raises many types
        words = str(error).strip().splitlines()[0] if str(error).strip() else ""
        yield Finding(BAD, f"cannot be joined: {type(error).__name__}: {words}", JOIN, check=check)


USAGE = """\
Check every node for common problems of Ray and MPI, and print advice for each.

  alchemist doctor                          this machine, its Ray cluster or its Slurm job
  alchemist slurm run -- alchemist doctor   in a job: also Ray and gangs
  alchemist doctor --address 10.0.0.1:6379 --nodes 4
"""
EXAMINE_TIMEOUT_S = 40.0  # for a node to answer; the limits of its checks are shorter
LISTEN_TIMEOUT_S, DIAL_TIMEOUT_S = 15.0, 25.0
THIS = "this program"


class Examination:
    """The findings so far, and the current stage, for a report if that stage hangs."""

    def __init__(self, options: argparse.Namespace) -> None:
        site = sites.load(options.site) if options.site or os.environ.get(sites.VARIABLE) else None
        self.expected = Expected.of(site)
        self.options = options
        self.findings: list[Finding] = []
        self.nodes: list[str] = []
        self.stage = "starting"
        # Ray's own output goes to stderr: it is not part of the report.
        sys.stdout.flush()
        self.out = os.dup(1)
        os.dup2(2, 1)

    def add(self, findings: Iterable[Finding]) -> None:
        self.findings += findings

    def run(self) -> None:
        """Check the job's nodes, Ray's nodes, or this one."""
        self.add([*authentication(), *node.threads()])
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
        self.add(
            [
                Finding(
                    INFO,
                    "no Ray runs in this job: `alchemist slurm run -- alchemist doctor` starts one "
                    "and checks gangs too", check="Ray address"
                )
            ]
        )  # fmt: skip
        self.stage = "starting a step on every node"
        self._probed(lambda: StepProbes(names))
        if not self.options.no_ranks:
            self.stage = "starting a step of MPI programs"
            self.add(ranks.srun_world(names, self.expected, self.options.ranks_per_node))

    def _on_ray(self) -> None:
        self.stage = "joining Ray"
        self.add(join(self.options.address, start=not self.options.no_ranks))
        try:
            if not ray.is_initialized():
                self._probed(LocalProbe)
                return
            answers, nodes = self._probed(RayProbes)
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
                        BAD, f"Ray has {there} of {wanted} nodes",
                        "run `ray start --address=...` on the others; raylet.err on a node that "
                        "left shows the reason", check="nodes"
                    )
                ]
            )  # fmt: skip

    def _probed(self, make: Callable[[], Fanout]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check every node, then the network between them; returns the answers, and Ray's nodes."""
        probes = make()
        self.nodes = list(probes.names)
        try:
            self.stage = "checking every node"
            expected = asdict(self.expected)
            answers = self._told(
                probes.ask("examine", expected, len(self.nodes), limit_s=EXAMINE_TIMEOUT_S)
            )
            for told in answers.values():
                self.add(from_map(told["findings"]))
            versions = {name: told["versions"] for name, told in answers.items()}
            if not isinstance(probes, LocalProbe):
                versions[THIS] = node.versions()
            self.add(probe.same_versions(versions))
            if len(self.nodes) > 1:
                self.stage = "connecting every node with others"
                listeners = self._told(
                    probes.ask("listen", expected, self.nodes, limit_s=LISTEN_TIMEOUT_S)
                )
                dialled = self._told(probes.ask("dial", listeners, limit_s=DIAL_TIMEOUT_S))
                self.add([*probe.reached(dialled), *probe.clocks(dialled)])
        finally:
            probes.close()
        return answers, getattr(probes, "nodes", {})

    def _told(self, answers: dict[str, Any]) -> dict[str, Any]:
        """Return the answers; add a finding for each node without one."""
        for name, answer in answers.items():
            if isinstance(answer, NoAnswer):
                finding = Finding(
                    BAD, answer.reason,
                    "install this version of alchemist-on-ray there, for the same Python; check "
                    "that the node is up and its disk answers; see Ray's worker log there",
                    node=name, check="node"
                )  # fmt: skip
                self.add([] if finding in self.findings else [finding])
        return {name: a for name, a in answers.items() if not isinstance(a, NoAnswer)}


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist doctor``. Returns 0, or 1 if a finding is bad."""
    options = _parser().parse_args(argv[1:])
    examination = Examination(options)

    def give_up() -> None:
        """Report and exit if a stage exceeds even its own time limit."""
        examination.add(
            [
                Finding(
                    BAD, f"still {examination.stage} after {options.limit:g} s",
                    "this stage hangs; --limit gives it more time, --no-ranks skips gangs",
                    check="doctor"
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
    return finding.exit_code(examination.findings)


def _failed(examination: Examination, error: AlchemistError) -> Finding:
    message = f"{examination.stage}: {type(error).__name__}: {error.args[0]}"
    return Finding(BAD, message, "see the message", check="doctor")


def _show(examination: Examination) -> None:
    render = finding.as_json if examination.options.json else finding.table
    text = render(list(examination.findings), examination.nodes)
    with os.fdopen(os.dup(examination.out), "w") as out:
        out.write(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist doctor",
        description=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--address", help="host:port of a Ray cluster (default: the one found)")
    parser.add_argument("--nodes", type=int, metavar="N", help="expected number of nodes")
    parser.add_argument("--site", help="site file with expected settings, by name or path")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-ranks", action="store_true", help="do not start a gang or Ray")
    parser.add_argument(
        "--ranks-per-node", type=int, default=2, metavar="N", help="ranks to start (default: 2)"
    )
    parser.add_argument("--launcher", default="auto", help="launcher of the ranks (default: auto)")
    parser.add_argument(
        "--start-timeout",
        type=positive,
        default=START_TIMEOUT_S,
        metavar="SECONDS",
        help=f"time limit of the gang's start (default: {START_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=240.0,
        metavar="SECONDS",
        help="time limit of the whole run (default: 240)",
    )
    return parser
