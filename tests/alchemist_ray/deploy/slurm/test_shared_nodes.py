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
    return {
        "nid1": {"cores": 4, "others": []},
        "nid2": {"cores": cores, "others": others},
    }


def test_whole_nodes_need_no_warning() -> None:
    assert allocation.check(JOB, nodes(4, []), "refuse") == []


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (nodes(8, []), r"nid2 \(4 of 8 CPUs are this job's\)"),
        (nodes(4, ["ada", "bob"]), r"nid2 \(processes of ada, bob\)"),
        (nodes(4, list("abcdef")), r"nid2 \(processes of a, b, c, d, \.\.\.\)"),
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


def test_other_people_are_seen_by_their_processes() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    uid = 54321
    with subprocess.Popen(["sleep", "60"], user=uid) as process:
        try:
            assert str(uid) in allocation.other_users()
        finally:
            process.kill()
    assert str(uid) not in allocation.other_users()


def test_uids_of_a_directory_are_people_and_those_of_services_and_containers_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start processes of other users")
    named = {1234567: "eve", 65534: "nobody"}

    def account(uid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((named[uid], "x", uid, uid, "", "/", "/bin/sh"))

    monkeypatch.setattr(allocation.pwd, "getpwuid", account)  # the machine has no directory
    others = [subprocess.Popen(["sleep", "60"], user=uid) for uid in (1234567, 65534, 165536)]
    try:
        found = allocation.other_users()
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert "eve" in found
    assert not {"nobody", "165536"} & set(found)
