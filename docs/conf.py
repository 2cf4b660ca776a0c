"""Sphinx: the pages of docs/, the README of every package, and the API reference.

The source directory is the repository, so that links between pages and READMEs are the same on a
code host and in the built site. ``make docs`` turns warnings, broken links among them, into errors.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "Alchemist on Ray"
(release,) = re.findall(
    r'^__version__ = "(.*)"$', (ROOT / "alchemist_ray" / "version.py").read_text(), re.MULTILINE
)
version = os.environ.get("DOCS_VERSION", release)
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
include_patterns = [
    "docs/**.md",
    "docs/tutorials/*.ipynb",
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "**/README.md",
    "benchmarks/results/*.md",
    "benchmarks/results/papers/*.md",
]
exclude_patterns = [".*", "build", "out", "ali/templates", "**/__pycache__", "kuberay/overlays"]

# --- Markdown -------------------------------------------------------------------------
myst_heading_anchors = 4
nb_execution_mode = "off"  # with the outputs that `make tutorials` has stored
myst_enable_extensions = ["fieldlist"]
suppress_warnings = [
    "toc.not_included",  # test READMEs are pages that no table of contents names
    "ref.python",  # several classes have a `shape`: the word in a docstring links to one of them
]

# --- the API reference ----------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = False
napoleon_use_rtype = False
default_role = "py:obj"  # `Handle.fetch` in a docstring links to it where it is documented

# --- HTML -----------------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = f"{project} {version}"
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "logo": {"text": f"{project} {version}"},
    # Of the site's root, so that old versions show new ones; DOCS_ROOT: where that is on its host.
    "switcher": {
        "json_url": os.environ.get("DOCS_ROOT", "/") + "switcher.json",
        "version_match": version,
    },
    "check_switcher": False,
    "navbar_start": ["navbar-logo", "version-switcher"],
}


def link_to_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """A link to a folder, which a code host shows, becomes one to its README, or plain text."""
    here = (ROOT / docname).parent

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        if not (here / target).is_dir():
            return link[0]
        readme = f"{target.rstrip('/')}/README.md"
        return f"[{text}]({readme})" if (here / readme).exists() else text

    source[0] = re.sub(r"\[([^\]]+)\]\(([\w./-]+)\)", replace, source[0])


def list_versions(app: Sphinx, error: Exception | None) -> None:
    """Write the file of versions beside the folder of this one, and where the site begins."""
    if error is not None or "DOCS_VERSION" not in os.environ:
        return
    site = Path(app.outdir).parent
    numbers = [page.parents[1].name for page in site.glob("*/docs/index.html")]
    releases = [name for name in numbers if re.fullmatch(r"\d+(\.\d+)+", name)]
    releases.sort(key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    root = os.environ.get("DOCS_ROOT", "/")
    others = sorted(set(numbers) - {*releases, "stable"})
    entries = [{"version": name, "url": f"{root}{name}/docs/"} for name in releases + others]
    if releases:
        entries[0] |= {"name": f"{releases[0]} (stable)", "preferred": True}
        (site / "stable").unlink(missing_ok=True)
        (site / "stable").symlink_to(releases[0])
    (site / "switcher.json").write_text(json.dumps(entries, indent=1) + "\n")
    first = f"{(releases or others)[0]}/docs/index.html"
    (site / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={first}">\n')


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", link_to_files)
    app.connect("build-finished", list_versions)
    return {"parallel_read_safe": True}
