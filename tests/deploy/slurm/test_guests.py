"""``alchemist virtual-cluster`` on the hosts of a job: a holder on each, and nothing left of them.

libvirt's test driver makes the guests: they exist and never boot. (Real ones: `deploy/virtual`.)
"""

from __future__ import annotations

import shutil

import pytest

from tests.deploy.slurm.cluster import Slurm
from tests.deploy.slurm.conftest import ALCHEMIST, assert_clean


def test_each_host_of_a_job_has_its_guests_and_ends_them(slurm: Slurm) -> None:
    if not shutil.which("virsh"):
        pytest.skip("no virsh (apt-get install libvirt-clients)")
    image = slurm.shared / "image"
    image.mkdir(exist_ok=True)
    for name in ("vmlinuz", "initrd.gz", "root.img"):
        (image / name).touch()
    up = [*ALCHEMIST, "virtual-cluster", "up", "--image", image, "--cpus", 1, "--memory", "256M"]
    up += ["--emulate", "--connect", "test:///default", "--limit", 1]
    done = slurm.salloc("-c2", *up, limit_s=250)
    assert done.returncode == 1
    assert "not ready in 1 s" in done.stderr, done.stderr
    # Had a host not said that its guests are gone, that would have been the error.
    assert "do not answer" not in done.stderr
    assert not (slurm.shared / ".alchemist" / "virtual" / "vc").exists()
    assert_clean(slurm.nodes)
