"""Site launchers as text: srun's, PALS', ALPS' and Hydra's command lines, and how one is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from alchemist_ray.errors import LaunchError
from alchemist_ray.launchers import LAUNCHERS, chosen, settings
from alchemist_ray.launchers.base import Launcher
from mpi_workers.node.specs import RANK_PROGRAM, GangPlan, NodePlan, RankOptions, Start

NODES = ("nid09", "nid10", "nid12")
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "nid[09-10,12]", "SLURM_CONF": "/etc/s.conf"}


def plan(*ranks: int) -> GangPlan:
    nodes = tuple(NodePlan(f"10.0.0.{i}", n, NODES[i]) for i, n in enumerate(ranks))
    manager, options = ("unix:/x", "tcp:10.0.0.0:1"), RankOptions(threads=4)
    return GangPlan("g1.2", nodes, "secret", manager, 1 << 20, options)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of these names, as far as looking for them goes."""
    for name in ("srun", "mpiexec", "aprun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def start(launcher: Launcher, *ranks: int) -> Start:
    found = launcher.start(plan(*ranks))
    assert found is not None
    assert found.across_nodes
    return found


def started(launcher: Launcher, *ranks: int) -> list[str]:
    return start(launcher, *ranks).argv


@pytest.mark.usefixtures("tools")
def test_srun_gets_the_nodes_and_how_many_ranks_on_each() -> None:
    srun = LAUNCHERS["srun"](JOB)
    head = ["srun", "--jobid=4711", "--overlap", "--mpi=pmi2", "--kill-on-bad-exit=1"]
    argv = started(srun, 2, 2)
    assert argv[: len(head)] == head
    assert argv[-5:] == [
        "--nodes=2", "--ntasks=4", "--nodelist=nid09,nid10", "--ntasks-per-node=2", RANK_PROGRAM,
    ]  # fmt: skip
    assert "--overcommit" in argv
    assert "--cpu-bind=none" in argv
    assert started(srun, 3, 3, 1)[-4:-1] == [
        "--ntasks=7", "--nodelist=nid09,nid10,nid12", "--distribution=plane=3",
    ]  # fmt: skip
    assert started(srun, 4)[-3:-1] == ["--nodelist=nid09", "--ntasks-per-node=4"]


@pytest.mark.usefixtures("tools")
def test_srun_gets_a_list_of_hosts_for_any_other_numbers() -> None:
    found = start(LAUNCHERS["srun"](JOB), 1, 3, 2)
    assert found.argv[-2] == "--distribution=arbitrary"
    listed = found.files["SLURM_HOSTFILE"].split()  # written where srun runs
    assert listed == ["nid09", "nid10", "nid10", "nid10", "nid12", "nid12"]


@pytest.mark.usefixtures("tools")
def test_srun_is_given_the_job_and_none_of_the_outer_steps_options() -> None:
    found = start(LAUNCHERS["srun"](JOB), 2, 2)
    assert found.adds == {"SLURM_JOB_ID": "4711", "SLURM_CONF": "/etc/s.conf"}
    assert "SLURM_" in found.drops


@pytest.mark.usefixtures("tools")
def test_a_sites_own_pmi_and_options() -> None:
    env = {**JOB, "ALCHEMIST_SRUN": "srun --network=job_vni", "ALCHEMIST_SRUN_MPI": "cray_shasta"}
    found = start(LAUNCHERS["srun"](env), 2, 2)
    assert found.argv[:3] == ["srun", "--network=job_vni", "--jobid=4711"]
    assert "--mpi=cray_shasta" in found.argv
    assert "--mpi=pmi2" in found.advice
    assert "srun --mpi=list" in found.advice


@pytest.mark.usefixtures("tools")
def test_ranks_are_numbered_as_slurm_does() -> None:
    srun = LAUNCHERS["srun"](JOB)
    assert srun.order(["nid12", "nid09", "nid10"]) == [1, 2, 0]
    with pytest.raises(LaunchError, match=r"login1 is not a node of Slurm job 4711 \(nid09, nid10"):
        srun.order(["nid09", "login1"])
    assert LAUNCHERS["pmi"]().order(["nid12", "nid09"]) == [0, 1]


@pytest.mark.usefixtures("tools")
def test_srun_outside_a_job_or_without_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"alchemist slurm run.*launcher='pmi'"):
        LAUNCHERS["srun"]({}).order(["a"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="there is no program 'srun'; ALCHEMIST_SRUN sets one"):
        LAUNCHERS["srun"](JOB).start(plan(1))


@pytest.mark.usefixtures("tools")
def test_pals_aprun_and_hydra_get_a_part_for_each_node() -> None:
    pals = ["-n", "2", "--ppn", "2", "--hosts", "nid09", "--depth", "4", "--cpu-bind", "none"]
    last = ["-n", "1", "--ppn", "1", "--hosts", "nid10", "--depth", "4", "--cpu-bind", "none"]
    assert started(LAUNCHERS["pals"]({}), 2, 1) == [
        "mpiexec", "--envall", "--line-buffer", *pals, RANK_PROGRAM, ":", *last, RANK_PROGRAM,
    ]  # fmt: skip
    assert started(LAUNCHERS["pals"]({"ALCHEMIST_PALS": "mpiexec --pmi=pmix"}), 2)[:2] == [
        "mpiexec", "--pmi=pmix",
    ]  # fmt: skip
    assert started(LAUNCHERS["aprun"]({}), 3, 1) == [
        "aprun", "-q", "-n", "3", "-N", "3", "-L", "nid09", "-d", "4", "-cc", "none", RANK_PROGRAM,
        ":", "-n", "1", "-N", "1", "-L", "nid10", "-d", "4", "-cc", "none", RANK_PROGRAM,
    ]  # fmt: skip
    assert started(LAUNCHERS["hydra"]({}), 1, 2) == [
        "mpiexec", "-n", "1", "-host", "nid09", RANK_PROGRAM,
        ":", "-n", "2", "-host", "nid10", RANK_PROGRAM,
    ]  # fmt: skip
    with pytest.raises(LaunchError, match=r"no program 'gone'; ALCHEMIST_APRUN.*launcher='pmi'"):
        LAUNCHERS["aprun"]({"ALCHEMIST_APRUN": "gone -q"}).start(plan(1))


def test_a_launcher_is_chosen_by_the_site_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ALCHEMIST_LAUNCHER", raising=False)
    assert chosen("auto") == "pmi"
    monkeypatch.setenv("ALCHEMIST_LAUNCHER", "srun")
    assert chosen("auto") == "srun"
    assert chosen("mpiexec") == "mpiexec"
    monkeypatch.setenv("ALCHEMIST_LAUNCHER", "rsh")
    with pytest.raises(ValueError, match=r"ALCHEMIST_LAUNCHER must be one of auto, pmi.*got 'rsh'"):
        chosen("auto")
    monkeypatch.setenv("ALCHEMIST_SRUN_MPI", "pmix")
    assert settings() == {"ALCHEMIST_SRUN_MPI": "pmix"}
