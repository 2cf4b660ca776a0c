"""Finding libEl, and what is said when it is not there or does not fit: needs no Elemental."""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import LibraryNotFoundError
from ali import elemental, registry
from ali.elemental import library
from mpi_workers.failures import Failure

ABSENT = "libEl-that-is-nowhere.so"


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "NAME", ABSENT)
    monkeypatch.setattr(library, "_opened", {})
    monkeypatch.delenv(library.VARIABLE, raising=False)


def refused(kind: str, *words: str, path: str | None = None) -> None:
    """Check that it is not found, with this kind of failure and all these words."""
    with pytest.raises(Failure) as error:
        library.find(path)
    assert error.value.kind == kind
    for one in words:
        assert one in error.value.message


def test_where_it_is_nowhere_it_says_what_was_looked_for_and_how_to_get_it() -> None:
    refused(
        "LibraryNotFoundError", f"{library.VARIABLE} is not set", f"node {os.uname().nodename}",
        "cannot open shared object file",  # the loader's own words
        "build it as a shared library against the MPICH that the gang uses",
    )  # fmt: skip


def test_the_registry_passes_the_refusal_on() -> None:
    with pytest.raises(Failure) as error:
        registry.load("elemental")
    assert error.value.kind == "LibraryNotFoundError"


@pytest.mark.parametrize("way", ["load_library()", library.VARIABLE])
def test_a_path_to_nothing_is_named_with_where_it_came_from(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/nowhere/libEl.so"
    if way == library.VARIABLE:
        monkeypatch.setenv(library.VARIABLE, path)
    words = f"no file {path} on node {os.uname().nodename} (from {way})"
    refused("LibraryNotFoundError", words, path=None if way == library.VARIABLE else path)


def test_an_explicit_path_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "/nowhere/one.so")
    refused("LibraryNotFoundError", "/nowhere/two.so", path="/nowhere/two.so")


def test_a_file_that_is_not_a_library_is_refused_with_the_loaders_message(tmp_path: Path) -> None:
    path = tmp_path / "libEl.so"
    path.write_text("x" * 5000)
    refused("LibraryLoadError", f"{path} does not load", "invalid ELF header", path=str(path))


def test_a_library_that_is_not_elemental_is_refused() -> None:
    path = importlib.import_module("numpy._core._multiarray_umath").__file__
    words = "more: it is not Elemental 0.88's libEl with its C interface"
    refused("LibraryLoadError", "has no ElUsing64BitInt", words, path=path)


def stub(folder: Path, name: str, source: str = "", *, leave_out: str = "") -> str:
    """A shared object with all the functions that are asked of libEl, which do nothing."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    wanted = [*library.PLAIN]
    for table, letters in library.TABLES:
        wanted += [f"{function}_{letter}" for function in table for letter in letters]
    lines = [f"int El{name}(void) {{ return 0; }}" for name in wanted if name != leave_out]
    code, path = folder / f"{name}.c", folder / f"{name}.so"
    code.write_text("\n".join([*lines, source]))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, code], check=True, timeout=60)
    return str(path)


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    old = stub(tmp_path, "old", leave_out="SVDDist_z")
    refused("LibraryLoadError", "has no ElSVDDist_z: it is not Elemental 0.88's", path=old)


def test_one_that_brings_another_mpi_is_refused(tmp_path: Path) -> None:
    other = stub(tmp_path, "other", "int MPI_Comm_rank(void) { return 0; }")
    words = f"is linked to the MPI in {other}", "this gang runs on the MPI in"
    refused("LibraryLoadError", *words, path=other)
    assert library._opened == {}


def test_a_process_holds_one_elemental(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_check_mpi", lambda *_: None)
    one, two = stub(tmp_path, "one"), stub(tmp_path, "two")
    found = library.find(one)
    (tmp_path / "link.so").symlink_to(one)
    monkeypatch.setenv(library.VARIABLE, one)
    assert library.find(str(tmp_path / "link.so")) is library.find() is found
    words = f"has loaded {one}", "call request_workers() again"
    refused("LibraryLoadError", *words, path=two)


def test_it_is_loaded_when_the_library_is_and_documents_every_routine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_check_mpi", lambda *_: None)
    loaded = registry.load("elemental", stub(tmp_path, "stub"))
    about = {fields["name"]: fields for fields in loaded.describe()["routines"]}
    assert sorted(about) == sorted(elemental.__all__)
    for name, fields in about.items():
        for part in ("Parameters\n----------", "Notes\n-----", "ource"):
            assert part in fields["doc"], f"{name} lacks {part!r}"
    loaded.close()


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        (1, "ResourceError", "EL_ALLOC_ERROR"),
        (3, "RoutineError", "EL_ARG_ERROR"),
        (4, "RoutineError", "EL_LOGIC_ERROR"),
        (5, "RoutineError", "EL_RUNTIME_ERROR"),
        (-1, "RoutineError", "EL_ERROR"),
        (77, "RoutineError", "77"),
    ],
)
def test_codes_become_failures(code: int, kind: str, name: str) -> None:
    failure = library.failure("ElSVDDist_d", code, "it would not")
    assert failure.kind == kind
    assert failure.message == f"Elemental's ElSVDDist_d failed: it would not ({name})"
    assert "stderr" in library.failure("ElSVDDist_d", code, "").message


def test_only_the_output_to_cerr_is_captured(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        cpp = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        pytest.skip("no libstdc++ here")
    cpp._ZNSt8ios_base4InitC1Ev(ctypes.create_string_buffer(64))  # as <iostream> does
    insert = cpp._ZSt16__ostream_insertIcSt11char_traitsIcEERSt13basic_ostreamIT_T0_ES6_PKS3_l
    insert.argtypes, insert.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_ssize_t], None
    cerr = ctypes.addressof(ctypes.c_char.in_dll(cpp, library.CERR))

    def say(text: bytes) -> None:
        insert(cerr, text, len(text))

    caught = library.ErrorMessages(cpp)
    say(b"before ")
    for turn in ("one", "two"):
        with caught.capture():
            say(f"Process 3 caught error message:\nturn {turn}\n failed\n".encode())
            os.write(2, b"a crash speaks here ")
        assert caught.take() == f"turn {turn} failed"
    assert caught.take() == ""
    say(b"after")
    assert capfd.readouterr().err == "before a crash speaks here a crash speaks here after"


def test_without_libstdcxx_nothing_is_caught_and_nothing_breaks() -> None:
    caught = library.ErrorMessages(ctypes.CDLL(np.linalg._umath_linalg.__file__))
    with caught.capture():
        pass
    assert caught.take() == ""


def test_a_missing_libel_is_reported(session: AlchemistSession) -> None:
    with pytest.raises(LibraryNotFoundError, match=r"no file /nowhere/libEl\.so on node"):
        session.load_library("elemental", "/nowhere/libEl.so")
    assert session.list_libraries() == []
