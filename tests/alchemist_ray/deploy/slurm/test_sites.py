"""Site files: the shipped ones are sound, and a wrong one is refused by the key at fault."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from alchemist_ray.deploy.slurm import sites
from alchemist_ray.errors import JobError, SiteError

SHIPPED = ["cray-cs", "cray-cs-slurm", "cray-ex", "cray-xc", "generic-slurm"]


def test_sites_are_shipped_and_say_what_they_are() -> None:
    assert sorted(path.stem for path in sites.SHIPPED.glob("*.toml")) == SHIPPED
    for name in SHIPPED:
        site = sites.load(name)
        assert site.name == name
        assert site.about


def test_a_crays_ranks_are_started_by_its_srun() -> None:
    for name in ("cray-ex", "cray-xc"):
        site = sites.load(name)
        assert (site.mpi.launcher, site.mpi.pmi) == ("srun", "cray_shasta")
        assert site.nodes.interface
        assert site.mpi.library.endswith("libmpi.so.12")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"mpi": {"lancher": "srun"}}, "'mpi.lancher'.*did you mean 'launcher'"),
        ({"colour": "blue"}, "unknown key 'colour'; known keys are"),
        ({"mpi": {"launcher": "rsh"}}, "mpi.launcher must be one of auto, pmi, mpiexec, srun"),
        (
            {"nodes": {"interface": "hsn0"}},
            "nodes.interface = 'hsn0': it must be a list of strings",
        ),
        ({"nodes": {"object_store": 3}}, "between 0 and 1"),
        ({"job": {"spare_s": True}}, "must be a whole number"),
        ({"job": {"spare_s": math.nan}}, "must be a whole number"),
        ({"job": {"spare_s": -1}}, "must not be negative"),
        ({"job": {"nodes": "select={nodes}:mem={mem}"}}, "only {nodes} and {cpus} are replaced"),
        ({"nodes": {"start": "pbsdsh 'u"}}, "nodes.start = .*No closing quotation"),
        ({"nodes": {"start": " "}}, "nodes.start must name a command"),
        ({"mpi": {"command": 'srun "'}}, "mpi.command = .*No closing quotation"),
        ({"environment": {"MY-VAR": "1"}}, "'MY-VAR' is not the name of a variable"),
        ({"mpi": "srun"}, "must be a table"),
        ({"environment": {"X": 1}}, "must be a table of strings"),
        ({"software": {"modules": ["a", 1]}}, "must be a list of strings"),
        ({"container": {"runtime": "docker"}}, "one of shifter"),
    ],
)
def test_what_no_site_has_is_refused_by_name(told: dict[str, Any], words: str) -> None:
    with pytest.raises(SiteError, match=words):
        sites.parse(told, "mine.toml", "mine")


def test_sites_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "OWN", tmp_path)
    (tmp_path / "mine.toml").write_text('about = "mine"\n[nodes]\ntmp = "/local"\n')
    assert sites.load("mine").nodes.tmp == "/local"
    assert sites.load(str(tmp_path / "mine.toml")) == sites.load("mine")
    assert "mine" in sites.names()
    monkeypatch.setenv(sites.VARIABLE, "mine")
    assert sites.load().name == "mine"
    monkeypatch.delenv(sites.VARIABLE)
    assert sites.load().name == "generic-slurm"


def test_a_site_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"'cori'.*cray-cs, cray-cs-slurm, cray-ex, cray-xc"):
        sites.load("cori")
    with pytest.raises(SiteError, match="no site file"):
        sites.load(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("= 1")
    with pytest.raises(SiteError, match=r"broken\.toml"):
        sites.load(str(broken))
    assert issubclass(SiteError, JobError)
    assert issubclass(SiteError, ValueError)
