"""Launchers as plans and specs, without starting anything."""

from __future__ import annotations

import pytest

from alchemist_ray.errors import LaunchError
from alchemist_ray.launchers import LAUNCHERS
from alchemist_ray.launchers.mpiexec import find_mpiexec
from mpi_workers.node.specs import RANK_PROGRAM
from mpi_workers.wire.pmi import PmiNode, process_mapping, segment_names
from tests.alchemist_ray.launchers.test_site_launchers import plan


def test_pmi_gives_each_node_its_ranks() -> None:
    gang = plan(3, 1, 2)
    assert [list(gang.ranks(node)) for node in range(3)] == [[0, 1, 2], [3], [4, 5]]
    assert gang.size == 6
    assert plan(1).kvs_name != plan(1).kvs_name
    assert LAUNCHERS["pmi"]().start(gang) is None


def test_mpiexec_is_for_one_machine() -> None:
    start = LAUNCHERS["mpiexec"]().start(plan(4))
    assert start is not None
    assert start.argv[1:] == ["-n", "4", RANK_PROGRAM]
    assert not start.across_nodes
    with pytest.raises(LaunchError, match="launcher='pmi'"):
        LAUNCHERS["mpiexec"]().start(plan(2, 2))


def test_a_sites_own_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALCHEMIST_MPIEXEC", "env FOO=1 mpiexec")
    assert find_mpiexec() == ["env", "FOO=1", "mpiexec"]
    monkeypatch.setenv("ALCHEMIST_MPIEXEC", "/nowhere/mpiexec")
    with pytest.raises(LaunchError, match="/nowhere/mpiexec"):
        find_mpiexec()


def test_a_plan_does_not_show_its_secret() -> None:
    assert "secret" not in repr(plan(1))


def test_pmi_barriers_meet_above_the_node() -> None:
    sent: list[tuple[int, str]] = []
    barriers: list[dict[str, str]] = []
    node = PmiNode(
        "job", 4, [2, 3], process_mapping([2, 2]),
        send=lambda rank, line: sent.append((rank, line)),
        barrier=barriers.append,
        abort=lambda rank, code: sent.append((rank, f"abort {code}")),
        say=lambda rank, text: sent.append((rank, text)),
    )  # fmt: skip
    node.line(2, "cmd=put kvsname=job key=a value=x=1;y z")
    node.line(2, "cmd=barrier_in")
    assert barriers == []
    node.line(3, "cmd=barrier_in")
    assert barriers == [{"a": "x=1;y z"}]
    sent.clear()
    node.release({"a": "x=1;y z", "b": "2"})
    assert sent == [(2, "cmd=barrier_out rc=0"), (3, "cmd=barrier_out rc=0")]
    node.line(3, "cmd=get kvsname=job key=b")
    node.line(3, "cmd=get kvsname=job key=PMI_process_mapping")
    node.line(3, "cmd=get kvsname=job key=none")
    node.line(3, "cmd=abort exitcode=7")
    answers = [line for _, line in sent[2:]]
    assert answers[0] == "cmd=get_result rc=0 value=2"
    assert answers[1].endswith("value=(vector,(0,2,2))")
    assert "rc=-1" in answers[2]
    assert answers[3] == "abort 7"


def test_segment_names_are_mpichs() -> None:
    """Seen of MPICH 5.0.2: the name is FNV-1a of the job's."""
    assert segment_names("alchemist_0123456789abcdef", 0)[0] == "mpich_shm_9e0d3ef8_0"
