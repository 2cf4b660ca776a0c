"""Sphinx: the pages of docs/, the README of every package, and the API reference.

The source directory is the repository, so that links between pages and READMEs are the same on a
code host and in the built site. ``make docs`` turns warnings, broken links among them, into errors.
"""

from __future__ import annotations

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
version = release
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
include_patterns = [
    "docs/**.md",
    "docs/tutorials/*.ipynb",
    "README.md",
    "CHANGELOG.md",
    "**/README.md",
    "benchmarks/results/*.md",
    "benchmarks/results/papers/*.md",
]
exclude_patterns = [".*", "build", "out", "ali/templates", "**/__pycache__", "kuberay/overlays"]

# --- Markdown -------------------------------------------------------------------------
myst_heading_anchors = 4
nb_execution_mode = "off"  # with the outputs that `make tutorials` has stored
myst_enable_extensions = ["fieldlist"]
suppress_warnings = ["toc.not_included"]  # test READMEs are pages that no table of contents names

# --- the API reference ----------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = False
napoleon_use_rtype = False
default_role = "py:obj"  # `Handle.fetch` in a docstring links to it where it is documented

# --- HTML -----------------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = project
html_show_sourcelink = False
html_theme_options = {"show_prev_next": False, "navigation_with_keys": False}


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


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", link_to_files)
    return {"parallel_read_safe": True}
