"""The launcher for Slurm's srun, with the site's PMI, MPI and fabric.

One step per gang, on the nodes that Ray has reserved, next to Ray's own step (``--overlap``). Ray
counts the CPUs, so srun does not (``--overcommit``; no binding, which would bind two gangs of a
node to the same cores).
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence

from alchemist_ray.errors import LaunchError
from alchemist_ray.launchers.base import Launcher
from mpi_workers.node.specs import GangPlan, NodePlan, Start

COMMAND = "ALCHEMIST_SRUN"  # the program and options to add: "srun --network=..."
PMI = "ALCHEMIST_SRUN_MPI"  # value of --mpi
DEFAULT_PMI = "pmi2"  # MPICH and its ABI relatives; part of every Slurm
# A step's variables would be options of an srun within it: --ntasks, --cpus-per-task, ...
DROPPED = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_")
KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_CLUSTER_NAME")

ITEM = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")  # of a list of nodes
RANGES = re.compile(r"\[([^\]]*)\]")


def expand(text: str) -> list[str]:
    """Return the names in Slurm's list of nodes, such as ``nid[001-003,007],login1``, in order.

    Raises `ValueError` if it is malformed.
    """
    if text.count("[") != text.count("]"):
        raise ValueError(f"{text!r} is not a list of nodes: a bracket is not closed")
    return [name for item in ITEM.findall(text) for name in _names(item)]


def _names(item: str) -> Iterator[str]:
    found = RANGES.search(item)
    if found is None:
        yield item
        return
    head, tail = item[: found.start()], item[found.end() :]
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"{item!r} is not a list of nodes: {part!r} is not a range")
        for number in range(int(first), int(last or first) + 1):
            yield from _names(head + str(number).zfill(len(first)) + tail)


def step_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job that a new step of it needs."""
    return {name: env[name] for name in KEPT if name in env}


def srun_command(env: Mapping[str, str]) -> list[str]:
    """Return the program that starts steps, with the site's options.

    Raises
    ------
    LaunchError
        Outside a Slurm job, or if there is no such program.
    """
    words = shlex.split(env.get(COMMAND, "")) or ["srun"]
    if "SLURM_JOB_ID" not in env:
        raise LaunchError(
            "launcher 'srun' starts ranks inside a Slurm job, but Ray does not run in one here "
            "(no SLURM_JOB_ID): start it with `alchemist slurm run`, or use launcher='pmi'"
        )
    if shutil.which(words[0]) is None:
        raise LaunchError(f"launcher 'srun': there is no program {words[0]!r}; {COMMAND} sets one")
    return [*words, f"--jobid={env['SLURM_JOB_ID']}"]


def placement(nodes: Sequence[NodePlan]) -> list[str]:
    """Return srun's options that put the ranks on these nodes, in this order.

    Slurm tells MPI which ranks share a node only for regular placements: equal numbers, or fewer
    on the last node. Other placements use a list with the host of each rank (SLURM_HOSTFILE).
    MPI then assumes that each rank is alone on its node: results are right, but slower.
    """
    names = ",".join(node.name for node in nodes)
    counts = [node.ranks for node in nodes]
    regular = len(set(counts[:-1])) <= 1 and counts[-1] <= counts[0]
    head = [f"--nodes={len(nodes)}", f"--ntasks={sum(counts)}"]
    if not regular:
        return [*head, "--distribution=arbitrary"]
    if counts[-1] == counts[0]:
        return [*head, f"--nodelist={names}", f"--ntasks-per-node={counts[0]}"]
    return [*head, f"--nodelist={names}", f"--distribution=plane={counts[0]}"]


class SrunLauncher(Launcher):
    """For machines whose fabric needs Slurm's launcher, on any number of nodes of a job."""

    name = "srun"
    settings = (COMMAND, PMI)

    def order(self, names: Sequence[str]) -> list[int]:
        """Return the order of the job's list of nodes, in which Slurm numbers ranks."""
        srun_command(self.env)
        known = expand(self.env.get("SLURM_JOB_NODELIST", ""))
        missing = [name for name in names if name not in known]
        if missing:
            raise LaunchError(
                f"launcher 'srun': {', '.join(missing)} is not a node of Slurm job "
                f"{self.env['SLURM_JOB_ID']} ({', '.join(known) or 'no nodes'}): "
                "Ray was started there in another way. Use launcher='pmi'"
            )
        return sorted(range(len(names)), key=lambda i: known.index(names[i]))

    def start(self, plan: GangPlan) -> Start:
        pmi = self.env.get(PMI, DEFAULT_PMI)
        argv = [
            *srun_command(self.env), "--overlap", f"--mpi={pmi}", "--kill-on-bad-exit=1",
            "--overcommit", "--cpu-bind=none", "--quiet", "--input=none",
            f"--job-name=gang-{plan.gang}", *placement(plan.nodes), *self.rank_program(),
        ]  # fmt: skip
        hosts = "".join(f"{node.name}\n" * node.ranks for node in plan.nodes)
        advice = (
            f"srun was given --mpi={pmi}: set {PMI} (the site file's mpi.pmi) to another of those "
            "that `srun --mpi=list` shows. MPICH, MVAPICH and Intel MPI take --mpi=pmi2, "
            "Cray MPICH --mpi=cray_shasta, Open MPI --mpi=pmix"
        )
        return Start(
            argv,
            step_environment(self.env) | self.rank_variables(),
            DROPPED,
            {"SLURM_HOSTFILE": hosts} if "--distribution=arbitrary" in argv else {},
            advice,
            across_nodes=True,
        )
