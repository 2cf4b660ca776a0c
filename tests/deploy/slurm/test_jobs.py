"""Jobs of their own: submitted, sharing a node, told to end, cancelled; by sbatch and by qsub."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.slurm.cluster import Slurm
from tests.deploy.slurm.conftest import ALCHEMIST, PROGRAM, START_S, SUBMIT, Submitted, assert_clean
from tests.faults.hosts import Host


@pytest.fixture(scope="module")
def job(slurm: Slurm) -> Submitted:
    """A job of three nodes with 2 CPUs each, run to its end."""
    words = [*ALCHEMIST, "slurm", *SUBMIT, "-N", 3, "-c", 2, "--", *PROGRAM, "everything"]
    submitted = Submitted(slurm, slurm.login(*words))
    submitted.wait(START_S + 150)
    print(submitted.log)
    return submitted


def test_a_submitted_job_ends_with_its_programs_exit_code(slurm: Slurm, job: Submitted) -> None:
    assert job.code == 7, job.log
    assert_clean(slurm.nodes)


def test_only_its_user_can_join_its_ray(job: Submitted) -> None:
    assert job.told("job") == {"token": "0o600", "auth": "token", "folder": "0o700"}
    folder = Path(job.script).parent
    assert not (folder / "token").exists()  # the job is over
    assert not (folder / "address.json").exists()


def test_a_gang_has_every_node_and_the_job_no_more(slurm: Slurm, job: Submitted) -> None:
    pmi = job.told("pmi")
    assert sorted({host for _, host, _ in pmi["workers"]}) == [n.name for n in slurm.nodes]
    assert {address for _, _, address in pmi["workers"]} == {n.ip for n in slurm.nodes}
    assert pmi["error"] < 1e-12
    too_few = job.told("too-few")
    assert too_few["kind"] == "ResourceError"
    assert "7 workers" in too_few["message"]
    assert too_few["seconds"] < 5


def test_srun_starts_a_gang_on_two_nodes(job: Submitted) -> None:
    told = job.told("srun")
    hosts = [host for _, host, _ in told["workers"]]
    assert len(hosts) == 4
    assert hosts == sorted(hosts)  # as Slurm numbers them
    assert len(set(hosts)) == 2
    assert told["error"] < 1e-12
    assert told["step"][0] == 4
    assert int(told["step"][1]) >= 1  # a step of its own, beside Ray's
    assert job.told("sharing") == 2  # MPI knows which ranks share a node
    assert job.told("env") == ["given"] * 4


def test_srun_starts_ranks_again_in_the_memory_of_those_before(job: Submitted) -> None:
    raised = job.told("raised")
    assert raised["kind"] == "RoutineError"
    assert "ZeroDivisionError" in raised["message"]
    assert job.told("goes-on") == 6
    again = job.told("again")  # three ranks: two on a node, one on another
    assert len(again["workers"]) == 3
    assert again["error"] < 1e-12
    for name, ranks in (("killed", 4), ("killed-again", 3)):
        killed = job.told(name)
        assert killed["kind"] == "GroupRecoveredError", killed
        assert f"rank {ranks - 1} " in killed["message"]
        assert killed["seconds"] < 5
        assert killed["ranks"] == ranks
        assert killed["kept"]
        assert killed["another step"]
        print(f"  srun, {ranks} ranks on 2 nodes: error {killed['seconds']:.2f} s,", end=" ")
        print(f"ranks again {killed['renewed_s']:.2f} s later")


def test_a_wrong_pmi_is_refused_with_the_flag_to_try(job: Submitted) -> None:
    wrong = job.told("wrong")
    assert wrong["kind"] == "LaunchError"
    assert "is in an MPI world of 1 instead of 2 ranks" in wrong["message"]
    assert "--mpi=none" in wrong["message"]
    assert "srun --mpi=list" in wrong["message"]
    assert "--mpi=pmi2" in wrong["message"]
    assert wrong["seconds"] < 40


# Ports that answer a request without a token; asked from another node.
ASKS = """
import http.client, sys
ip, *ports = sys.argv[1:]
for port in ports:
    for path in ("/", "/metrics", "/api/version"):
        connection = http.client.HTTPConnection(ip, int(port), timeout=5)
        try:
            connection.request("GET", path)
            if (status := connection.getresponse().status) not in (401, 403, 404):
                print(port, path, status)
        except (OSError, http.client.HTTPException):
            pass  # gRPC, or a port of this package
        finally:
            connection.close()
"""
LISTENING = """
import psutil
for found in psutil.net_connections("tcp"):
    if found.status == "LISTEN" and not found.laddr.ip.startswith("127."):
        print(found.laddr.port)
"""


def answering(asking: Host, asked: Host) -> list[str]:
    """The ports of a host that answer HTTP requests without a token, except slurmd's."""
    ports = asked.run(sys.executable, "-c", LISTENING).split()
    assert len(ports) > 10
    return asking.run(sys.executable, "-c", ASKS, asked.ip, *ports, limit_s=240).splitlines()


def test_two_jobs_share_a_node_and_one_is_told_to_end(slurm: Slurm, submit: Any) -> None:
    """As the time limit does: SIGTERM to the job script alone, a while before the end."""
    node = slurm.nodes[1]
    go = slurm.shared / "go"
    here = ("-c", 2, f"--option=--nodelist={node.name}")
    first, second = submit(*here, program=["save"]), submit(*here, program=["stay", str(go)])
    addresses = {job.wait_told("address") for job in (first, second)}
    assert len(addresses) == 2
    assert {address.split(":")[0] for address in addresses} == {node.ip}
    assert answering(slurm.nodes[0], node) == []
    slurm.login("scancel", "--batch", "--signal=TERM", first.number)
    assert first.wait_told("saved", 30) == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert first.wait() == 5
    go.touch()  # the other has not noticed
    assert second.wait() == 7
    assert second.told("error") < 1e-12
    assert_clean([node])


def test_cancelled_jobs_leave_nothing_and_their_programs_get_one_sigterm(
    slurm: Slurm, submit: Any
) -> None:
    """By scancel; and by qdel in the middle of a transfer. The log names the time limit."""
    counting = submit("-c", 1, program=["count"])
    sending = submit("-N", 2, "-c", 2, program=["transfer"], system="pbs")
    counting.wait_told("address")
    assert len({host for _, host, _ in sending.wait_told("workers")}) == 2
    sending.wait_told("sent")
    assert slurm.state(counting.number)["Requeue"] == "0"  # nor run again if a slurmd is killed
    assert sending.number in slurm.login("qstat")
    slurm.login("scancel", counting.number)
    slurm.login("qdel", sending.number)
    for job in (counting, sending):
        assert slurm.wait(job.number, 30)["JobState"] == "CANCELLED"
    assert counting.told("signals") == 1, counting.log
    said = (
        r"SIGTERM: the program has 8 s to end with [5-9]:\d\d left of the job's time limit of 10:00"
    )
    assert re.search(said, counting.log)  # half of KillWait
    assert_clean(slurm.nodes)


def test_a_cancelled_program_saves_from_its_gangs(slurm: Slurm, submit: Any) -> None:
    """scancel signals all processes of the job: those of Ray and of the gangs wait for it."""
    jobs = [
        submit("-N", 2, "-c", 1, program=["save", "2", launcher]) for launcher in ("auto", "srun")
    ]
    for job in jobs:
        job.wait_told("address")
    slurm.login("scancel", *(job.number for job in jobs))
    for job in jobs:
        job.wait(30)
        assert job.told("ranks") == 2, job.log
        assert job.told("saved") == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        last = job.log.strip().splitlines()[-1]
        assert re.fullmatch(r"alchemist: the job was ended by SIGTERM .*; exit code 5", last)
        assert not (Path(job.script).parent / "token").exists()
    assert_clean(slurm.nodes)


def test_a_time_limit_above_the_partitions_is_warned_of(slurm: Slurm) -> None:
    words = ("submit", "-p", "short", "-t", "30", "--", "true")
    said = slurm.login(*ALCHEMIST, "slurm", *words)
    job = re.findall("^job (.*)$", said, re.M)[0]
    slurm.login("scancel", job)
    (warning,) = re.findall("^warning: .*$", said, re.M)
    assert "requests 30:00 (-t)" in warning
    assert "partition short allows 5:00 (-t)" in warning
    assert "warning" not in slurm.login(*ALCHEMIST, "slurm", *words[:4], "4", "--", "true")


def test_pbs_by_slurms_own_qsub(slurm: Slurm, submit: Any) -> None:
    options = ("-N", 2, "-c", 2)
    job = submit(*options, program=["found", "by", "qsub"], system="pbs")
    assert "#PBS -l nodes=2:ppn=2" in Path(job.script).read_text()
    assert job.wait() == 3, job.log
    told = job.told("found")
    assert (told["nodes"], told["argv"]) == (2, ["by", "qsub"])
    assert_clean(slurm.nodes)


@pytest.mark.parametrize("words", [("-N", 99), ("-N", 1, "-c", 999), ("-N", 1, "--mem", "9999G")])
def test_a_job_that_can_never_start_is_refused_at_submission(
    slurm: Slurm, words: tuple[str | int, ...]
) -> None:
    before = slurm.login("squeue", "--noheader")
    said = slurm.login(*ALCHEMIST, "slurm", "submit", *words, "--", "true", check=False)
    assert "JobError: " in said
    assert "can never start" in said
    assert "sinfo" in said
    assert slurm.login("squeue", "--noheader") == before


def test_what_sbatch_refuses_is_said_and_leaves_no_folder(slurm: Slurm) -> None:
    before = set((slurm.shared / ".alchemist" / "jobs").glob("*"))
    said = slurm.login(
        *ALCHEMIST, "slurm", "submit", "-p", "nowhere", "--", "true", check=False, limit_s=60
    )
    assert "JobError: sbatch" in said
    assert "nowhere" in said
    assert set((slurm.shared / ".alchemist" / "jobs").glob("*")) == before
    bare = slurm.login(*ALCHEMIST, "slurm", "run", "--", "true", check=False)
    assert "JobError: not inside a Slurm or PBS job" in bare


@pytest.mark.parametrize("option", ["--gres=gpu:2", "--gpus-per-task=2"])
def test_ranks_see_the_gpus_that_slurm_has_given_to_the_job(
    slurm: Slurm, submit: Any, option: str
) -> None:
    job = submit("-N", 2, "-c", 2, f"--option={option}", program=["gpus"])
    assert job.wait(START_S) == 0, job.log
    for launcher in ("pmi", "srun"):
        seen = sorted(map(tuple, job.told(launcher)))
        assert [device for _, device in seen] == ["0", "1"] * 2, job.log
        assert len({host for host, _ in seen}) == 2
    assert "4 GPUs on 2 nodes, room for 4" in job.told("too-many")["message"]
    assert_clean(slurm.nodes)
