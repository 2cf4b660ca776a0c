"""The nodes and CPUs of a job, read from the variables of Slurm and PBS; ports; the address."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray import network
from alchemist_ray.cluster.batch_job import JobCluster, JobFolder
from alchemist_ray.deploy.slurm import allocation, program
from alchemist_ray.deploy.slurm.allocation import MEBI, Node
from alchemist_ray.errors import JobError
from alchemist_ray.launchers.srun import expand
from mpi_workers.wire.interfaces import interfaces

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "nid[0009-0010,0012]",
    "SLURM_JOB_CPUS_PER_NODE": "64(x2),32",
}


def test_a_slurm_job() -> None:
    job = allocation.current({**JOB, "SLURM_MEM_PER_CPU": "1000"})
    assert (job.job, job.uses_srun) == ("4711", True)
    assert job.nodes == (
        Node("nid0009", 64, 64000 * MEBI),
        Node("nid0010", 64, 64000 * MEBI),
        Node("nid0012", 32, 32000 * MEBI),
    )
    whole = allocation.current({**JOB, "SLURM_MEM_PER_NODE": "2048"})
    assert {node.memory_nbytes for node in whole.nodes} == {2048 * MEBI}
    assert {node.memory_nbytes for node in allocation.current(JOB).nodes} == {None}


def test_a_pbs_job(tmp_path: Path) -> None:
    listed = tmp_path / "nodes"
    listed.write_text("b\nb\na\na\n")
    env = {"PBS_JOBID": "12.server", "PBS_NODEFILE": str(listed)}
    job = allocation.current(env)
    assert (job.job, job.uses_srun) == ("12.server", False)
    assert job.nodes == (Node("b", 2), Node("a", 2))
    assert allocation.current({**env, "NCPUS": "8"}).nodes[0] == Node("b", 8)
    assert allocation.current({**env, "SLURM_JOB_ID": "12"}).uses_srun  # Slurm's torque wrappers
    listed.write_text("")
    with pytest.raises(JobError, match="is empty"):
        allocation.current(env)
    with pytest.raises(JobError, match="cannot read its list"):
        allocation.current({**env, "PBS_NODEFILE": "/nowhere"})


def test_what_is_no_job_says_how_to_get_one() -> None:
    with pytest.raises(JobError, match="salloc"):
        allocation.current({})
    with pytest.raises(JobError, match="SLURM_JOB_NODELIST is not set"):
        allocation.current({"SLURM_JOB_ID": "1"})
    with pytest.raises(JobError, match="3 nodes, but CPU counts for 1"):
        allocation.current({**JOB, "SLURM_JOB_CPUS_PER_NODE": "64"})
    with pytest.raises(JobError, match="is not a list of numbers"):
        allocation.current({**JOB, "SLURM_JOB_CPUS_PER_NODE": "many"})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("nid001", ["nid001"]),
        ("a,b", ["a", "b"]),
        ("nid[08-11]", ["nid08", "nid09", "nid10", "nid11"]),
        ("x[1,3-4]-ib,login1", ["x1-ib", "x3-ib", "x4-ib", "login1"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("", []),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["a[1", "a[x-y]", "a[]"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of nodes"):
        expand(text)


@given(st.integers(1, 10**9), st.integers(1, allocation.BLOCKS - allocation.TRIES))
def test_jobs_that_are_near_each_other_never_share_ports(job: int, later: int) -> None:
    mine = {allocation.block(str(job), attempt) for attempt in range(1)}
    theirs = allocation.block(str(job + later))
    assert theirs not in mine
    assert allocation.FIRST <= theirs <= allocation.END - allocation.BLOCK_PORTS
    assert max(allocation.ports(theirs).values()) < theirs + allocation.BLOCK_PORTS


def test_a_block_with_a_port_in_use_is_passed_over() -> None:
    job = "4711.server"
    first = allocation.free_attempts(job, "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", allocation.block(job, first[0]) + 3))
        taken.listen()
        assert allocation.free_attempts(job, "127.0.0.1") == first[1:]


def test_the_interface_by_name_or_by_the_way() -> None:
    here = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "hsn1": "10.1.0.2", "hsn0": "10.1.0.1"}
    assert network.address_of(["hsn0", "ib*"], here) == "10.1.0.1"
    assert network.address_of(["ib*", "hsn*"], here) == "10.1.0.1"
    with pytest.raises(JobError, match=r"no interface ib0 .*nodes.interface.*eth0 \(10.0.0.1\)"):
        network.address_of(["ib0"], here)
    assert interfaces()["lo"] == "127.0.0.1"
    assert network.local_address(["lo"], "10.0.0.1") == "127.0.0.1"
    assert network.local_address([], "127.0.0.1") == "127.0.0.1"
    with pytest.raises(JobError, match="has no route to"):
        network.address_towards("no.such.host.invalid")


def test_a_list_of_nodes_may_name_the_domain() -> None:
    """PBS lists nodes as its server knows them: the program needs no srun to run on this one."""
    folder = JobFolder(Path("job"))
    for name in (os.uname().nodename, f"{os.uname().nodename}.cluster.example.org"):
        head = JobCluster("10.0.0.1:1", "7", name, [name], 1, "", 0, [], {})
        assert program.on_head(["app"], head, folder, {})[0] == ["app"]
    other = JobCluster("10.0.0.1:1", "7", "another.example.org", [], 1, "", 0, [], {})
    assert program.on_head(["app"], other, folder, {})[0][0] == "srun"


def test_jobs_of_an_array_have_ports_of_their_own() -> None:
    blocks = [
        allocation.block(f"123[{index}].server")
        for index in range(allocation.BLOCKS - allocation.TRIES)
    ]
    assert len(set(blocks)) == len(blocks)
    assert allocation.block("123.server77") == allocation.block("123")
