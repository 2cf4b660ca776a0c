"""The documentation builds without a warning, and its reference lists everything public."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

from tests.docs.pages import ROOT, documents
from tests.support import commands

BUILD_S = 300
OURS = "alchemist_ray|ali|envs|mpi_workers|cray"
IMPORT = re.compile(rf"^ *from ((?:{OURS})[\w.]*) import (\([^)]*\)|[^\n(#]+)", re.M)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
# READMEs of packages and these pages are for those who change the code.
INNER = ("alchemist_ray/", "mpi_workers/", "docs/architecture.md", "docs/CONTRIBUTING.md")
EXPORTS = """
import importlib, json, sys
names = {}
for module in map(importlib.import_module, sys.argv[1:]):
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        defined = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        names[f"{module.__name__}.{name}"] = defined
print(json.dumps(names))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, as `make docs` builds them; broken links and bad docstrings are errors."""
    folder = tmp_path_factory.mktemp("site")
    commands.output(
        sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs",
        "-d", folder / "doctrees", ".", folder / "0.1.0", cwd=ROOT, limit_s=BUILD_S,
        DOCS_VERSION="0.1.0",
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def listed(site: Path) -> set[str]:
    """Full names of what the reference shows."""
    with (site / "0.1.0/objects.inv").open("rb") as file:
        found = InventoryFile.load(file, "", lambda base, path: path)
    names = getattr(found, "data", found)  # Sphinx 8 returns a dict, Sphinx 9 an object
    return {name for kind in names if kind.startswith("py:") for name in names[kind]}


@pytest.mark.timeout(BUILD_S + 30)
def test_each_page_shows_its_version_and_the_menu_of_versions(site: Path) -> None:
    page = (site / "0.1.0/docs/index.html").read_text()
    assert 'data-version="0.1.0"' in page or "version_match = '0.1.0'" in page.replace('"', "'")
    assert "Alchemist on Ray 0.1.0" in page
    assert 'theme_switcher_json_url = "/switcher.json"' in page.replace("'", '"')
    (entry,) = json.loads((site / "switcher.json").read_text())
    assert entry["version"] == "0.1.0"
    assert (site / entry["url"].strip("/") / "index.html").exists()
    assert (site / "stable/CHANGELOG.html").exists()


@pytest.mark.timeout(BUILD_S + 30)
def test_the_reference_lists_what_public_modules_export(listed: set[str]) -> None:
    modules = [name for name in sorted(listed) if is_module(name)]
    assert {"alchemist_ray", "ali", "envs", "alchemist_ray.sparse.linalg"} <= set(modules)
    exports = json.loads(commands.python(EXPORTS, *modules, cwd=ROOT, code=0).stdout)
    missing = {name for name, defined in exports.items() if not {name, defined} & listed}
    # `inspect` is what `alchemist_ray.transfer.sources` calls.
    assert missing <= {"alchemist_ray.__version__", "alchemist_ray.clients.spark.inspect"}


@pytest.mark.timeout(BUILD_S + 30)
def test_the_reference_lists_what_pages_for_users_import(listed: set[str]) -> None:
    missing = {
        f"{module}.{name.split()[0]}": page
        for page, text in programs().items()
        for module, names in IMPORT.findall(text)
        for name in names.strip("() \n,").split(",")
        if f"{module}.{name.split()[0]}" not in listed
    }
    assert not missing


def programs() -> dict[str, str]:
    """The Python of the pages and notebooks for users, and of the templates."""
    found = {}
    for path in documents():
        name = str(path.relative_to(ROOT))
        if not name.startswith(INNER):
            found[name] = "\n".join(PYTHON.findall(path.read_text()))
    for path in (ROOT / "docs/tutorials").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        code = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        found[path.name] = "\n".join(code)
    for path in (ROOT / "ali/templates").rglob("*.py.in"):
        found[path.name] = path.read_text()
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()
