"""The values that ranks exchange in MPI_Init pass through Slurm's PMI-1 unchanged."""

from __future__ import annotations

import sys

import pytest

from tests.deploy.slurm.cluster import Slurm
from tests.deploy.slurm.conftest import assert_clean

SPEAKER = (sys.executable, "-m", "tests.deploy.slurm.pmi_speaker")


@pytest.mark.parametrize("relay", [True, False])
def test_the_longest_value_that_is_allowed_comes_whole(slurm: Slurm, relay: bool) -> None:
    """Without the relay it is lost, or the ranks hang: else the relay is not needed."""
    words = [*SPEAKER, *(["relay"] if relay else [])]
    done = slurm.salloc("srun", "--mpi=pmi2", "--input=none", *words, limit_s=120)
    assert done.stdout.count("whole=True") == (2 if relay else 0), done.stderr[-3000:]
    assert_clean(slurm.nodes)
