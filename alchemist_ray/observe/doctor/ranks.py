"""A gang over all nodes: it starts, finds itself by PMI, and every rank says what it runs on."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from alchemist_ray.errors import AlchemistError, LaunchError
from alchemist_ray.observe.doctor.finding import BAD, INFO, OK, WARN, Expected, Finding
from alchemist_ray.observe.doctor.software import fits
from alchemist_ray.runtime.placement import Reservation
from alchemist_ray.session import AlchemistSession

CALL_S = 30.0
SLOW_S = 20.0


def examine(
    nodes: Mapping[str, Mapping[str, Any]],
    ranks_per_node: int,
    launcher: str,
    expected: Expected,
    limit_s: float,
    names: Mapping[str, str],
) -> list[Finding]:
    """Start `ranks_per_node` ranks on each of Ray's nodes (by name), be their CPUs free or not.

    The gang is gone when this returns.
    """
    places = Reservation(tuple((node["NodeID"], ranks_per_node) for node in nodes.values()))
    size = ranks_per_node * len(nodes)
    start = time.monotonic()
    try:
        with AlchemistSession(
            size, placement=places, launcher=launcher, start_timeout_s=limit_s, progress=False
        ) as session:
            took = time.monotonic() - start
            told = session.load_library("hpc").routine("about").options(timeout_s=CALL_S)()
            hosts = {worker.hostname for worker in session.list_workers()}
    except LaunchError as error:
        return [
            Finding(
                "gang", BAD, f"{size} ranks on {len(nodes)} node(s) do not start: {_line(error)}",
                "the message names the cause; `srun --mpi=list`, mpi.launcher and mpi.pmi of the "
                "site file if it is PMI; the gang's stderr is in the log of Ray's worker",
            )
        ]  # fmt: skip
    except (AlchemistError, ValueError) as error:
        return [
            Finding("gang", BAD, f"{type(error).__name__}: {_line(error)}", "see the message")
        ]  # fmt: skip
    ranks = [json.loads(text) for text in told]
    slow = took > SLOW_S
    findings = [
        Finding(
            "gang", WARN if slow else OK,
            f"{size} ranks on {len(hosts)} node(s) in {took:.1f} s",
            "a cold file system or an overloaded node; a second start is quicker if it is the first"
            if slow else "",
        )
    ]  # fmt: skip
    return findings + judged(ranks, expected, names)


def _line(error: Exception) -> str:
    return " ".join(str(error.args[0] if error.args else error).split())[:600]


def judged(
    ranks: Sequence[Mapping[str, Any]], expected: Expected, names: Mapping[str, str]
) -> list[Finding]:
    """What the ranks' own words mean; `names`: the nodes' interfaces by address."""
    talk = network(ranks, expected, names)
    return [*world(ranks), *library(ranks, expected), *cores(ranks), *talk]


def world(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Whether they are one MPI world."""
    sizes = {rank["size"] for rank in ranks}
    if sizes == {len(ranks)} and [rank["rank"] for rank in ranks] == list(range(len(ranks))):
        return [Finding("PMI", OK, f"one world of {len(ranks)}, ranks in order")]
    return [
        Finding(
            "PMI", BAD, f"{len(ranks)} ranks in worlds of {sorted(sizes)}",
            "the launcher's PMI is not that of the MPI: another mpi.pmi in the site file",
        )
    ]  # fmt: skip


def library(ranks: Sequence[Mapping[str, Any]], expected: Expected) -> list[Finding]:
    """Whether all run on the same MPI, and on the site's."""
    check = "MPI of the ranks"
    kinds = Counter((r["version"], r["family"], r["library"]) for r in ranks)
    (version, family, path), _ = kinds.most_common(1)[0]
    said = f"{version}, {family}, {path}"
    findings = []
    for (other, kind, where), _ in kinds.items():
        if (other, kind) != (version, family) or where != path:
            hosts = sorted(
                {r["host"] for r in ranks if (r["version"], r["library"]) == (other, where)}
            )
            worse = (other, kind) != (version, family)
            findings.append(
                Finding(
                    check, BAD if worse else WARN, f"{other}, {kind}, {where}; the others: {said}",
                    "one MPI for all: the same environment, modules, LD_LIBRARY_PATH on all nodes",
                    where=", ".join(hosts),
                )
            )  # fmt: skip
    return findings or [fits(check, said, path, expected) or Finding(check, OK, said)]


def cores(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Whether ranks and their threads have a core each."""
    by_host: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for rank in ranks:
        by_host[rank["host"]].append(rank)
    findings = []
    for host, there in by_host.items():
        wanted, has = sum(rank["threads"] for rank in there), max(rank["cores"] for rank in there)
        if wanted > has:
            findings.append(
                Finding(
                    "threads of the ranks", WARN,
                    f"{len(there)} ranks with {wanted} threads in all on {has} cores",
                    "fewer ranks on a node, or threads_per_worker=1; MPI and BLAS threads that "
                    "share a core wait for each other. One core for many ranks: is the step "
                    "bound to it (srun --cpu-bind=none)?",
                    where=host,
                )
            )  # fmt: skip
    threads = sorted({rank["threads"] for rank in ranks})
    said = f"{threads[0] if len(threads) == 1 else threads} a rank, cores enough"
    return findings or [Finding("threads of the ranks", OK, said)]


def network(
    ranks: Sequence[Mapping[str, Any]], expected: Expected, names: Mapping[str, str]
) -> list[Finding]:
    """Over what they talk to ranks on other nodes; `names`: the nodes' interfaces by address."""
    check = "network of the ranks"
    if len({rank["host"] for rank in ranks}) < 2:
        return [Finding(check, INFO, "all on one node: shared memory")]
    fabrics = sorted({fabric for rank in ranks for fabric in rank["fabrics"]})
    used = {address for rank in ranks for address in rank["addresses"]}
    by_name = Counter(names.get(address, address) for address in used)
    over = ", ".join(sorted(by_name)) or "nothing"
    said = f"TCP over {over}; fabric: {', '.join(fabrics) or 'none'}"
    if expected.launcher == "srun" and not fabrics:
        return [
            Finding(
                check, WARN, f"{said}; {expected.site} starts ranks by srun for its fabric",
                "is it the vendor's MPI that the ranks run on? MPICH_OFI_VERBOSE=1 makes Cray "
                "MPICH say which provider it takes",
            )
        ]  # fmt: skip
    wrong = [n for n in by_name if not any(fnmatchcase(n, p) for p in expected.interface)]
    if expected.interface and wrong and not fabrics:
        return [
            Finding(
                check, WARN, f"{said}; the site {expected.site} wants {expected.interface[0]}",
                "UCX_NET_DEVICES or FI_TCP_IFACE names the interface that MPI is to take "
                "([environment] of the site file)",
            )
        ]  # fmt: skip
    return [Finding(check, OK, said)]
