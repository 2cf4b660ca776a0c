"""Nodes that other users may share are reported, or refused."""

from __future__ import annotations

import os
import pwd
import subprocess
from typing import Any

import pytest

from alchemist_ray.deploy.slurm import allocation
from alchemist_ray.deploy.slurm.allocation import Allocation, Node
from alchemist_ray.errors import JobError

JOB = Allocation("7", (Node("nid1", 4), Node("nid2", 4)), uses_srun=True)


def nodes(cores: int, others: list[str]) -> dict[str, dict[str, Any]]:
    return {"nid1": {"cores": 4, "others": []}, "nid2": {"cores": cores, "others": others}}


def test_whole_nodes_need_no_warning() -> None:
    assert allocation.check(JOB, nodes(4, []), "refuse") == []


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (nodes(8, []), r"nid2 \(4 of 8 CPUs are this job's\)"),
        (nodes(4, ["ada", "bob"]), r"nid2 \(processes of ada, bob\)"),
        (nodes(4, list("abcdef")), r"nid2 \(processes of a, b, c, d and 2 more\)"),
    ],
)
def test_a_shared_node_is_named_or_refused(found: dict[str, Any], reason: str) -> None:
    [warning] = allocation.check(JOB, found, "warn")
    assert "nid1" not in warning
    assert allocation.check(JOB, found, "allow") == []
    with pytest.raises(JobError, match=f"{reason}.*set nodes.shared.*'refuse'"):
        allocation.check(JOB, found, "refuse")


def test_a_job_of_one_node_opens_no_mpi_port() -> None:
    alone = Allocation("7", JOB.nodes[1:], uses_srun=True)
    assert allocation.check(alone, nodes(8, ["ada"]), "refuse") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of other users")
def test_other_people_are_seen_by_their_processes_and_no_services_and_containers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also people of a directory, whose uids are large."""
    named = {1234567: "eve", 65534: "nobody"}

    def account(uid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((named[uid], "x", uid, uid, "", "/", "/bin/sh"))

    monkeypatch.setattr(allocation.pwd, "getpwuid", account)  # the machine has no directory
    uids = (54321, 1234567, 65534, 165536)
    others = [subprocess.Popen(["sleep", "60"], user=uid) for uid in uids]
    try:
        found = allocation.other_users()
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert {"54321", "eve"} <= set(found)
    assert not {"nobody", "165536"} & set(found)
    assert not {"54321", "eve"} & set(allocation.other_users())
