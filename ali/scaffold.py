"""``alchemist new-library``: creates a small library with its build and its test."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sysconfig
from importlib import resources
from pathlib import Path

from mpi_workers.protocol.libraries import SHIPPED

RESERVED = {*SHIPPED, "arrays", "rayleigh_benard", "lammps_crystal"}  # also those of `envs`
MAKE = "make test      # builds {} and tests it on MPI ranks"
CMAKE = """cmake -B build && cmake --build build      # {}
python -m pytest                           # tests it on MPI ranks"""
LANGUAGES = {  # the file that is loaded, and the commands that build and test it
    "c": ("lib{}.so", MAKE),
    "cpp": ("build/lib{}.so", CMAKE),
    "fortran": ("lib{}.so", MAKE),
    "python": ("{}.py", "python -m pytest      # tests it on MPI ranks"),
}


def include_directory() -> Path:
    """The folder of ``alchemist.h`` and ``alchemist.hpp``."""
    return Path(__file__).parent / "include"


def mpi_compiler(name: str) -> Path:
    """The gang's ``mpicc`` or ``mpicxx``: the one next to this Python.

    Raises
    ------
    FileNotFoundError
        If it does not exist; the message says how to install it.
    """
    found = Path(sysconfig.get_path("scripts")) / name
    if not found.is_file():
        raise FileNotFoundError(
            f"there is no {name} next to this Python ({found}): run `pip install mpich`; on a site "
            "with its own MPI use that compiler (make MPICC=cc)"
        )
    return found


def new_library(
    name: str, language: str, parent: Path, *, simulator: bool = False, sparse: bool = False
) -> Path:
    """Create a new library in the new folder ``parent/name``.

    Parameters
    ----------
    name : str
        An identifier of lower-case letters, digits and ``_``; not the name of a shipped library
        and, in Python, not the name of an importable module.
    language : {"c", "cpp", "fortran", "python"}
    parent : Path
    simulator : bool
        Create a simulator for the environments of `envs`.
    sparse : bool
        Create routines of sparse matrices; not in Fortran.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError
        For an invalid name or language.
    FileExistsError
        If the folder exists; nothing in it is changed.
    FileNotFoundError
        If the folder `parent` does not exist.
    """
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r} is not a valid library name: use lower-case letters, digits and _, as for a "
            "Python module"
        )
    if name in RESERVED:
        raise ValueError(f"{name!r} is the name of a shipped library: choose another")
    if language == "python" and importlib.util.find_spec(name) is not None:
        raise ValueError(f"{name!r} is the name of an installed Python module: choose another")
    if language not in LANGUAGES:
        raise ValueError(f"language must be one of {', '.join(LANGUAGES)}; got {language!r}")
    if sparse and (simulator or language == "fortran"):
        raise ValueError(
            "a library of sparse matrices is no simulator, and is made in C, C++ or Python; in "
            "Fortran use the types of alchemist.f90"
        )
    if not parent.is_dir():
        raise FileNotFoundError(f"the folder {parent.absolute()} does not exist")
    folder = parent / name
    if folder.exists():
        raise FileExistsError(f"{folder.absolute()} already exists: nothing in it was changed")
    folder.mkdir()
    file, build = LANGUAGES[language]
    words = {"name": name, "Class": name.title().replace("_", ""), "file": file.format(name)}
    words["build"] = build.format(words["file"])
    kinds = [language, "library"]
    if simulator:  # with the build files of a library
        kinds += [f"simulator_{language}", "simulator"]
    if sparse:
        kinds += [f"sparse_{language}", "sparse"]
    for kind in kinds:
        for template in resources.files("ali").joinpath("templates", kind).iterdir():
            if template.name.endswith(".in"):
                target = folder / _filled(template.name.removesuffix(".in"), words)
                target.write_text(_filled(template.read_text(), words))
    return folder


def _filled(template: str, words: dict[str, str]) -> str:
    return re.sub(f"@({'|'.join(words)})@", lambda mark: words[mark[1]], template)
