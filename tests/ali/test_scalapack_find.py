"""Where ScaLAPACK is looked for, and that a user is told why one cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from ali.scalapack import native
from mpi_workers.local import local_gang
from tests.support import launches
from tests.support.build import needs_compiler, shared_object

HELP = ("apt-get install libscalapack-mpich2.2", "pip install mkl", "cray-libsci", "SCALAPACK_LIB")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = str(tmp_path_factory.mktemp("libraries"))
    return local_gang.run("tests.ali.ranks_scalapack_find:failures", 1, folder)


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("nowhere", "LibraryNotFoundError", ("there is no ScaLAPACK on node", "libsci", "/system")),
        ("no file", "LibraryNotFoundError", ("there is no file", "/no.so (given)")),
        ("variable", "LibraryNotFoundError", ("there is no file", "/other.so (SCALAPACK_LIB)")),
        ("text", "LibraryLoadError", ("text.so", "file too short")),
        ("empty", "LibraryLoadError", ("empty.so", "psgemm_", "is it ScaLAPACK")),
        ("Open MPI", "LibraryLoadError", ("it needs libmpi.so.40", "run on MPICH")),
        ("Cray", "LibraryLoadError", ("it needs libmpi_gnu_123.so.12",)),
        ("no content", "LibraryLoadError", ("nothing.so: ", "file too short")),
        ("two parts", "LibraryLoadError", ("it needs libmpi.so.40",)),
        ("found", "LibraryLoadError", ("libnot.there.so.1: cannot open", "needs libmpi.so.40")),
    ],
)
def test_a_failure_says_what_and_where_and_what_to_do(
    said: dict[str, str], case: str, kind: str, words: tuple[str, ...]
) -> None:
    assert said[case].startswith(f"{kind}: ")
    for word in (*words, *HELP):
        assert word in said[case]


def test_what_a_user_has_set_up_comes_first(tmp_path: Path) -> None:
    assert launches.run("tests.ali.ranks_scalapack_find:order", 1, str(tmp_path)) == [
        ["sci/lib/libsci_gnu_mpi.so.6"],
        [
            "own/libmkl_core.so.2",
            "own/libmkl_sequential.so.2",
            "own/libmkl_intel_lp64.so.2",
            "own/libmkl_blacs_intelmpi_lp64.so.2",
            "own/libmkl_scalapack_lp64.so.2",
        ],
        ["system/libscalapack-mpich.so.2.10"],
        ["system/libscalapack-mpich.so.2.2"],
        ["own/libscalapack.so.2.1"],
    ]


def test_an_old_openblas_gets_the_processor(tmp_path: Path) -> None:
    assert launches.run("tests.ali.ranks_scalapack_find:processors", 1, str(tmp_path)) == {
        "no file": None,
        "old": None,
        "new": "HASWELL",
        "newest": "SKYLAKEX",
        "in part": "HASWELL",
        "told": "HASWELL",
        "after": False,
        "chosen": "ZEN",
    }


@needs_compiler
@pytest.mark.parametrize(
    ("name", "marker", "reference"),
    [
        ("libblas.so.3", "other", True),
        ("librefblas.so", "other", True),
        ("libblas.so.3", "openblas_get_config", False),
        ("libopenblas.so.0", "other", False),
    ],
)
def test_a_reference_blas_is_named_when_it_is_loaded(
    tmp_path: Path, name: str, marker: str, reference: bool
) -> None:
    required = set(native.symbols()) - {"dgemm_"}
    source = tmp_path / "blas.c"
    source.write_text(f"void dgemm_(void) {{}}\nvoid {marker}(void) {{}}\n")
    blas = shared_object(source, tmp_path / name)  # without a soname it is needed by its path
    text = "".join(f"void {function}(void) {{ dgemm_(); }}\n" for function in sorted(required))
    source.write_text(f"void dgemm_(void);\n{text}")
    library = shared_object(source, tmp_path / "libscalapack.so", str(blas))
    found, said = local_gang.run("tests.ali.ranks_scalapack_find:reference_blas", 1, str(library))
    assert found == (str(blas) if reference else None)
    assert [f"{blas} is the reference BLAS" in words for words in said] == [True] * reference


def test_it_runs_on_the_mpi_that_is_there() -> None:
    found = local_gang.run("tests.ali.ranks_scalapack_find:second_mpi", 2)
    if "missing" in found:
        pytest.skip(found["missing"])
    assert len(found["mpi"]) == 1
    assert found["alias"]
    assert found["again"]
    assert found["another"].startswith("LibraryLoadError: ")
    assert f"these ranks have already loaded {found['loaded']}" in found["another"]
    assert found["loaded"] in found["about"]
    assert "MPICH" in found["about"]
