"""Files that describe the project: they agree with each other, and with what is built."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from alchemist_ray.version import __version__

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    "CHANGELOG.md", "CITATION.cff", "Containerfile", "LICENSE", "Makefile", "README.md",
    "SECURITY.md", "alchemist_ray", "ali",
    "benchmarks", "constraints.txt", "constraints-user.txt", "cray", "docs", "envs", "kuberay",
    "mpi_workers", "pyproject.toml", "recipe", "tests",
}  # fmt: skip
# Names of conda-forge that differ from those of the package index.
CONDA = {"msgpack": "msgpack-python", "ray[default]": "ray-default"}


@pytest.fixture
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return found


def requirements(lines: list[str]) -> dict[str, str]:
    """The lower bound by name."""
    return dict(re.match(r"([\w.\[\]-]+) *(\S*)", line).groups() for line in lines)  # type: ignore[union-attr,misc]


def test_the_top_level_has_nothing_else() -> None:
    done = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("needs a clone")
    assert {name for name in done.stdout.split() if not name.startswith(".")} == TOP_LEVEL


def test_the_first_page_and_the_section_of_the_version_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    changes = (ROOT / "CHANGELOG.md").read_text()
    section = re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)",
                        changes, re.M | re.S)  # fmt: skip
    assert section is not None
    assert section[1].count("\n") <= 120


def test_the_citation_names_this_version_and_the_date_of_its_section() -> None:
    about = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert about["version"] == __version__
    assert f"## [{__version__}] - {about['date-released']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_recipe_is_read_by_rattler_build_and_has_the_dependencies(
    project: dict[str, Any],
) -> None:
    build = pytest.importorskip("rattler_build", reason="needs the extra 'lint'")
    variants = build.VariantConfig.from_yaml("c_stdlib: [sysroot]\nc_stdlib_version: ['2.17']\n")
    (rendered,) = build.Stage0Recipe.from_file(ROOT / "recipe/recipe.yaml").render(variants)
    recipe = rendered.recipe.to_dict()
    assert recipe["context"]["version"] == __version__
    needed = requirements([line.split(" ;")[0] for line in project["project"]["dependencies"]])
    wanted = {CONDA.get(name, name): bound for name, bound in needed.items()}
    wanted["python"] = project["project"]["requires-python"]
    assert requirements(recipe["requirements"]["run"]) == wanted
    builds = requirements(project["build-system"]["requires"])
    assert requirements(recipe["requirements"]["host"]).items() >= builds.items()
    (command,) = project["project"]["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(command)]


def test_the_placeholder_of_the_address_is_the_same_everywhere(project: dict[str, Any]) -> None:
    """What is replaced when the project has an address."""
    (home,) = {re.match(r"https://[\w.-]+", url)[0] for url in project["project"]["urls"].values()}  # type: ignore[index]
    host = home.removeprefix("https://")
    assert host.replace(".", r"\.") in (ROOT / ".github/workflows/ci.yml").read_text()
    recipe = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text())
    assert {recipe["about"][key].startswith(home) for key in ("homepage", "repository")} == {True}
    fancy = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert all(home in each["replacement"] for each in fancy["substitutions"])


def test_pages_of_experimental_parts_say_so_and_are_listed() -> None:
    marked = {
        path.name for path in (ROOT / "docs").glob("*.md")
        if re.search(r"^\*\*Experimental\*\*", path.read_text(), re.M)
    }  # fmt: skip
    listed = re.search(
        r"^Experimental .*?\n\n", (ROOT / "docs/upgrades.md").read_text(), re.M | re.S
    )
    assert listed is not None
    assert marked == set(re.findall(r"\]\(([\w-]+\.md)", listed[0]))
