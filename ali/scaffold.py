"""``alchemist new-library``: a small library that works, with its build and its test."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sysconfig
from importlib import resources
from pathlib import Path

SHIPPED = (
    "linalg", "scalapack", "elemental", "files", "arrays", "simulator", "echo", "rayleigh_benard",
    "lammps_crystal", "hpc",
)  # fmt: skip
LANGUAGES = {"c": "lib@name@.so", "cpp": "build/lib@name@.so", "python": "@name@.py"}


def include_directory() -> Path:
    """Where ``alchemist.h`` and ``alchemist.hpp`` are."""
    return Path(__file__).parent / "include"


def mpi_compiler(name: str) -> Path:
    """MPI's ``mpicc`` or ``mpicxx``, as the gang's ranks have it: the one beside this Python.

    Raises
    ------
    FileNotFoundError
        If there is none; says what brings one.
    """
    found = Path(sysconfig.get_path("scripts")) / name
    if not found.is_file():
        raise FileNotFoundError(
            f"there is no {name} beside this Python ({found}): `pip install mpich` brings one; on "
            "a site with an MPI of its own give its compiler (make MPICC=cc)"
        )
    return found


def new_library(name: str, language: str, parent: Path) -> Path:
    """Write a new library into the folder ``parent/name``, which is made.

    Parameters
    ----------
    name : str
        An identifier of lower-case letters, digits and ``_`` that means nothing yet: neither a
        shipped library nor, in Python, a module that could be imported.
    language : {"c", "cpp", "python"}
    parent : Path

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError
        For a name or a language that will not do.
    FileExistsError
        If the folder is there already; nothing in it is touched.
    FileNotFoundError
        If there is no folder `parent`.
    """
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r} cannot name a library: take lower-case letters, digits and _, as in a "
            "Python module's name"
        )
    if name in SHIPPED:
        raise ValueError(f"{name!r} is the name of a library that is shipped: take another")
    if language == "python" and importlib.util.find_spec(name) is not None:
        raise ValueError(f"{name!r} is the name of a Python module that is installed: take another")
    if language not in LANGUAGES:
        raise ValueError(f"language {language!r}: it is one of {', '.join(LANGUAGES)}")
    if not parent.is_dir():
        raise FileNotFoundError(f"there is no folder {parent.absolute()}")
    folder = parent / name
    if folder.exists():
        raise FileExistsError(f"{folder.absolute()} is there already: nothing in it was touched")
    folder.mkdir()
    words = {
        "@file@": LANGUAGES[language].replace("@name@", name),
        "@Class@": name.title().replace("_", ""),
        "@name@": name,
    }
    for template in resources.files("ali").joinpath("templates", language).iterdir():
        if template.name.endswith(".in"):
            text, target = template.read_text(), template.name.removesuffix(".in")
            for mark, word in words.items():
                text, target = text.replace(mark, word), target.replace(mark, word)
            (folder / target).write_text(text)
    return folder
