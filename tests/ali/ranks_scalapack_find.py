"""Rank side of test_scalapack_find.py: the places searched, and the libraries refused.

In a process of its own: what is loaded stays loaded.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from ali import loader
from ali.scalapack import native
from mpi_workers.failures import Failure
from mpi_workers.rank.gang_view import GangView
from tests.support.ranks_shared import failure_of


def library(path: Path, needs: str) -> str:
    """A shared object with nothing in it that was linked to some library."""
    path.write_bytes(loader.shared_object(path.name, [needs]))
    return str(path)


def failures(gang: GangView, folder: str) -> dict[str, str]:
    """Everything that can be wrong, in the words that the user gets."""
    home = Path(folder)
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_own_folder", lambda: home / "own")
        patch.setattr(native, "_folders", lambda: [home / "own", home / "system"])
        for name in (native.VARIABLE, "CRAY_LIBSCI_PREFIX_DIR"):
            patch.delenv(name, raising=False)
        said["nowhere"] = failure_of(native.load)
        said["no file"] = failure_of(native.load, f"{folder}/no.so")
        (home / "text.so").write_text("not a shared object")
        said["text"] = failure_of(native.load, f"{folder}/text.so")
        said["empty"] = failure_of(native.load, library(home / "empty.so", "libm.so.6"))
        said["Open MPI"] = failure_of(
            native.load, library(home / "libscalapack-openmpi.so.2.2", "libmpi.so.40")
        )
        said["Cray"] = failure_of(native.load, library(home / "libsci.so", "libmpi_gnu_123.so.12"))
        (home / "nothing.so").touch()
        said["no content"] = failure_of(native.load, f"{folder}/nothing.so")
        said["two parts"] = failure_of(
            native.load, f"{folder}/empty.so:{folder}/libscalapack-openmpi.so.2.2"
        )
        (home / "system").mkdir()
        library(home / "system" / "libscalapack.so.2.2", "libmpi.so.40")
        library(home / "system" / "libscalapack-mpich.so.2.2", "libnot.there.so.1")
        said["found"] = failure_of(native.load)
        patch.setenv(native.VARIABLE, f"{folder}/other.so")
        said["variable"] = failure_of(native.load)
    return said


def order(gang: GangView, folder: str) -> list[list[str]]:
    """The candidates in order: versions newest first, links once."""
    home = Path(folder)
    names = (
        "own/libmkl_scalapack_lp64.so.2", "own/libmkl_core.so.2", "own/libmkl_sequential.so.2",
        "own/libmkl_intel_lp64.so.2", "own/libmkl_blacs_intelmpi_lp64.so.2",
        "own/libmkl_blacs_openmpi_lp64.so.2", "own/libscalapack.so.2.1",
        "system/libscalapack-mpich.so.2.2", "system/libscalapack-mpich.so.2.10",
        "sci/lib/libsci_gnu_mpi.so.6", "sci/lib/libsci_gnu.so.6",
    )  # fmt: skip
    for name in names:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    (home / "system" / "libscalapack-mpich.so").symlink_to("libscalapack-mpich.so.2.10")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_own_folder", lambda: home / "own")
        patch.setattr(native, "_folders", lambda: [home / "own", home / "system"])
        patch.setenv("CRAY_LIBSCI_PREFIX_DIR", str(home / "sci"))
        return [
            [str(file.relative_to(home)) for file in candidate] for candidate in native.search()
        ]


def processors(gang: GangView, folder: str) -> dict[str, Any]:
    """The processor that a loaded OpenBLAS is told."""
    cpuinfo = Path(folder, "cpuinfo")
    found: dict[str, Any] = {"no file": loader._core(cpuinfo)}
    both = "avx2 fma"
    for name, flags in {
        "old": "sse3",
        "new": both,
        "newest": f"{both} avx512f avx512cd avx512bw avx512dq avx512vl",
        "in part": f"{both} avx512f avx512cd",
    }.items():
        cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        found[name] = loader._core(cpuinfo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_core", lambda _: "HASWELL")
        patch.delenv(loader.CORE_TYPE, raising=False)
        with loader.known_processor():
            found["told"] = os.environ[loader.CORE_TYPE]
        found["after"] = loader.CORE_TYPE in os.environ
        patch.setenv(loader.CORE_TYPE, "ZEN")
        with loader.known_processor():
            found["chosen"] = os.environ[loader.CORE_TYPE]
    return found


def reference_blas(gang: GangView, path: str) -> tuple[str | None, list[str]]:
    """The reference BLAS behind a library, by its file, and the warnings when it is loaded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = native.load(path).reference_blas()
    return found, [str(one.message) for one in caught]


def second_mpi(gang: GangView) -> dict[str, Any]:
    """Loading Debian's library brings no second MPI in, and no second ScaLAPACK after it."""
    try:
        loaded = native.load()
    except Failure as failure:
        return {"missing": failure.message}
    other = next(path for path in loader.mapped_files() if "libm.so" in path)
    files = {Path(path).name.partition(".so")[0] for path in loader.mapped_files()}
    return {
        "loaded": loaded.path,
        "mpi": sorted(name for name in files if name in ("libmpi", "libmpich")),
        "alias": loader.provide_mpich(),
        "again": native.load(loaded.path) is loaded,
        "another": failure_of(native.load, other),
        "about": native.describe(loaded),
    }
