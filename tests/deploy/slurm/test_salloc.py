"""Inside an allocation that is there: start, run, stop, as at a prompt."""

from __future__ import annotations

from tests.deploy.slurm.cluster import Slurm
from tests.deploy.slurm.conftest import ALCHEMIST, PROGRAM, assert_clean

SESSION = """\
set -x
{alchemist} slurm start --start-timeout 250 || exit 20
{alchemist} slurm start && exit 21
{alchemist} slurm run -- {program} found at once; echo "code $?"
srun --overlap -N1 -n1 -w {node} {program} found by itself; echo "code $?"
{alchemist} slurm stop || exit 22
{alchemist} slurm stop && exit 23
exit 11
"""


def test_start_run_stop_from_the_login_host(slurm: Slurm) -> None:
    """salloc's shell is on the login host: programs go to the node with Ray's head."""
    node = slurm.nodes[0].name
    text = SESSION.format(alchemist=" ".join(ALCHEMIST), program=" ".join(PROGRAM), node=node)
    script = slurm.shared / "session.sh"
    script.write_text(text)
    done = slurm.salloc("-c2", "bash", script)
    said = done.stdout + done.stderr
    assert done.returncode == 11, said
    assert "Ray is up on 2 nodes with 4 CPUs" in done.stdout
    assert "als.connect_to_alchemist(" in done.stdout
    assert "Ray already runs in this job" in done.stderr
    assert done.stdout.count("code 3") == 2, said
    assert done.stdout.count(f'"host": "{node}", "nodes": 2') == 2
    assert "no Ray of `alchemist slurm start` runs in this job" in done.stderr
    assert_clean(slurm.nodes)
