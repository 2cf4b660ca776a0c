"""Checks with ranks: a gang on all nodes, or a step of srun without Ray.

They start, form one MPI world, use the site MPI, and are started again after the loss of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from alchemist_ray.cluster.placement import Reservation
from alchemist_ray.deploy.slurm.signals import end
from alchemist_ray.deploy.slurm.sites import Site
from alchemist_ray.errors import AlchemistError, GroupRecoveredError
from alchemist_ray.launchers.srun import DEFAULT_PMI, PMI
from alchemist_ray.observe.doctor import probe
from alchemist_ray.observe.doctor.finding import BAD, INFO, OK, WARN, Finding, named
from alchemist_ray.observe.doctor.node import unfit
from alchemist_ray.observe.doctor.probe import StepProbes
from alchemist_ray.plural import counted
from alchemist_ray.session.alchemist_session import AlchemistSession

CALL_S = 30.0
SLOW_S = 20.0


def examine(
    nodes: Mapping[str, Mapping[str, Any]],
    ranks_per_node: int,
    launcher: str,
    site: Site,
    limit_s: float,
    names: Mapping[str, str],
) -> Iterator[Finding]:
    """Start `ranks_per_node` ranks on each of Ray's nodes (by name), even on busy CPUs.

    The gang has ended at the first finding.
    """
    places = Reservation(tuple((node["NodeID"], ranks_per_node) for node in nodes.values()))
    size = ranks_per_node * len(nodes)
    gang = f"{counted(size, 'rank')} on {counted(len(nodes), 'node')}"
    start = time.monotonic()
    try:
        with AlchemistSession(
            size, placement=places, launcher=launcher, start_timeout_s=limit_s, progress=False
        ) as session:
            took = time.monotonic() - start
            told = session.load_library("hpc").routine("about").options(timeout_s=CALL_S)()
            again = started_again(session)
    except (AlchemistError, ValueError) as error:
        words = " ".join(str(error.args[0] if error.args else error).split())[:600]
        yield Finding(
            BAD, f"{gang}: {type(error).__name__}: {words}",
            "the message names the cause; for PMI see `srun --mpi=list`, and mpi.launcher and "
            "mpi.pmi of the site file; the gang's stderr is in the log of Ray's worker",
            "gang",
        )  # fmt: skip
        return
    yield Finding(
        WARN if took > SLOW_S else OK, f"{gang} in {took:.1f} s",
        "cold file system or overloaded node: with a cold file system, the second start is faster",
        "gang",
    )  # fmt: skip
    yield from judged([json.loads(text) for text in told], site, names)
    yield again


def started_again(session: AlchemistSession) -> Finding:
    """End a rank: others must take the place of all, in the memory of the matrices."""
    begin = time.monotonic()
    try:
        with contextlib.suppress(GroupRecoveredError):
            session.run(lambda comm: os._exit(1) if comm.rank == comm.size - 1 else comm.Barrier())
        session.run(lambda comm: comm.Barrier(), timeout_s=CALL_S)
    except AlchemistError as error:
        words = " ".join(str(error.args[0]).split())[:600]
        return Finding(
            WARN, f"a gang that loses a rank goes on without ranks: {words}",
            "see that the launcher can be run again in the job, or set another (mpi.launcher of "
            "the site file; launcher='pmi'); max_failures and durable=True rebuild matrices",
            check="ranks started again",
        )  # fmt: skip
    took = time.monotonic() - begin
    return Finding(OK, f"{took:.2f} s after the loss of one", check="ranks started again")


Rank = Mapping[str, Any]  # the report of a rank: `ali.hpc.about`


def judged(ranks: Sequence[Rank], site: Site, names: Mapping[str, str]) -> list[Finding]:
    """Interpret the ranks' reports; `names` has the nodes' interfaces by address."""
    checks: dict[str, Iterable[Finding]] = {
        "PMI": [world(ranks)],
        "MPI of the ranks": library(ranks, site),
        "threads of the ranks": cores(ranks),
        "network of the ranks": [network(ranks, site, names)],
    }
    return [found for check, findings in checks.items() for found in named(check, findings)]


def world(ranks: Sequence[Rank]) -> Finding:
    """Check that the ranks form one MPI world."""
    sizes = {rank["size"] for rank in ranks}
    if sizes == {len(ranks)} and [rank["rank"] for rank in ranks] == list(range(len(ranks))):
        return Finding(OK, f"one world of {len(ranks)}, ranks in order")
    return Finding(
        BAD, f"{len(ranks)} ranks in worlds of {sorted(sizes)}",
        "the launcher's PMI does not fit the MPI: set another mpi.pmi in the site file",
    )  # fmt: skip


def library(ranks: Sequence[Rank], site: Site) -> Iterator[Finding]:
    """Check that all ranks use the same MPI, and the site's."""
    hosts: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for rank in ranks:
        hosts[rank["version"], rank["family"], rank["library"]].append(rank["host"])
    usual = max(hosts, key=lambda kind: len(hosts[kind]))
    message = ", ".join(usual)
    if len(hosts) == 1:
        yield unfit(message, usual[2], site) or Finding(OK, message)
    for kind, there in hosts.items():
        if kind != usual:
            yield Finding(
                BAD if kind[:2] != usual[:2] else WARN, f"{', '.join(kind)}; others: {message}",
                "use one MPI: the same environment, modules and LD_LIBRARY_PATH on all nodes",
                node=", ".join(sorted(set(there)))
            )  # fmt: skip


def cores(ranks: Sequence[Rank]) -> Iterator[Finding]:
    """Check that each thread of the ranks has a core."""
    by_host: dict[str, list[Rank]] = defaultdict(list)
    for rank in ranks:
        by_host[rank["host"]].append(rank)
    enough = True
    for host, there in by_host.items():
        wanted, has = sum(rank["threads"] for rank in there), max(rank["cores"] for rank in there)
        if wanted > has:
            enough = False
            yield Finding(
                WARN,
                f"{counted(len(there), 'rank')} with {counted(wanted, 'thread')} on "
                f"{counted(has, 'core')}",
                "use fewer ranks per node, or threads_per_worker=1: MPI and BLAS threads that "
                "share a core wait for each other. One core for many ranks: the step may be "
                "bound to it (srun --cpu-bind=none)",
                node=host
            )  # fmt: skip
    if enough:
        threads = sorted({rank["threads"] for rank in ranks})
        many = threads[0] if len(threads) == 1 else threads
        yield Finding(OK, f"{many} per rank, enough cores")


def network(ranks: Sequence[Rank], site: Site, names: Mapping[str, str]) -> Finding:
    """Check the network between ranks; `names` has the nodes' interfaces by address."""
    if len({rank["host"] for rank in ranks}) < 2:
        return Finding(INFO, "one node: shared memory")
    fabrics = sorted({fabric for rank in ranks for fabric in rank["fabrics"]})
    used = {names.get(address, address) for rank in ranks for address in rank["addresses"]}
    over = ", ".join(sorted(used)) or "nothing"
    message = f"TCP over {over}; fabric: {', '.join(fabrics) or 'none'}"
    if site.mpi.launcher == "srun" and not fabrics:
        return Finding(
            WARN, f"{message}; {site.name} starts ranks by srun for its fabric",
            "check that the ranks use the vendor's MPI; MPICH_OFI_VERBOSE=1 makes Cray MPICH "
            "print its provider",
        )  # fmt: skip
    wrong = [n for n in used if not any(fnmatchcase(n, p) for p in site.nodes.interface)]
    if site.nodes.interface and wrong and not fabrics:
        return Finding(
            WARN, f"{message}; the site {site.name} requires {site.nodes.interface[0]}",
            "set UCX_NET_DEVICES or FI_TCP_IFACE to the interface for MPI ([environment] of "
            "the site file)",
        )  # fmt: skip
    return Finding(OK, message)


STEP_TIMEOUT_S = 60.0
SWEEP_TIMEOUT_S = 20.0
SHOWN_CHARS = 400  # of the ranks' output, at each end
CLOCK_S = 1.0  # a file's time may be a tick late


def srun_world(probes: StepProbes, site: Site, ranks_per_node: int) -> list[Finding]:
    """Start MPI programs on the probes' nodes in a step; each reports the size of its world."""
    names = probes.names
    pmi = os.environ.get(PMI) or (site.name and site.mpi.pmi) or DEFAULT_PMI
    size = ranks_per_node * len(names)
    advice = (
        "choose from `srun --mpi=list`: pmi2 for MPICH, MVAPICH and Intel MPI, cray_shasta "
        f"for Cray MPICH, pmix for Open MPI; {PMI} or mpi.pmi of the site file sets it"
    )
    began = time.monotonic()
    ranks = probe.start(
        names, "mpi_workers", "world", pmi=pmi, tasks_per_node=ranks_per_node,
        options=["--kill-on-bad-exit=1", "--overcommit", "--cpu-bind=none", "--input=none"],
    )  # fmt: skip
    try:
        out, err = ranks.communicate(timeout=STEP_TIMEOUT_S)
        problem = _problem(size, ranks.returncode, out, err)
    except subprocess.TimeoutExpired as late:
        words = _short((late.stderr or b"").decode(errors="replace"))
        problem = f"no MPI_Init within {STEP_TIMEOUT_S:g} s {words}".rstrip()
    finally:
        end(ranks, 0.0)
    if problem:  # of ranks that were killed in MPI_Init
        probes.ask("sweep", time.monotonic() - began + CLOCK_S, limit_s=SWEEP_TIMEOUT_S)
    message = f"--mpi={pmi}: {problem or f'one world of {size}'}"
    return [Finding(BAD if problem else OK, message, advice, check="PMI of srun")]


def _problem(size: int, code: int, out: str, err: str) -> str:
    """Interpret the step's output; empty if its ranks form one world."""
    sizes = [json.loads(line)["size"] for line in out.splitlines() if line.startswith("{")]
    if code == 0 and sizes == [size] * size:
        return ""
    if sizes and set(sizes) != {size}:
        return f"{len(sizes)} ranks in worlds of {sorted(set(sizes))} instead of {size}"
    return f"exit code {code}, {len(sizes)} of {size} ranks answered: {_short(err)}"


def _short(err: str) -> str:
    """Shorten: the beginning shows the cause, the end the consequence."""
    words = " ".join(err.split())
    if len(words) <= 2 * SHOWN_CHARS:
        return words
    return f"{words[:SHOWN_CHARS]} ... {words[-SHOWN_CHARS:]}"
