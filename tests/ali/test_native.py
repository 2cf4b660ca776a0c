"""The C ABI: shared objects in C and C++ do what Python libraries do, and bad ones say why not."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from ali.native import NativeLibrary
from ali.registry import load
from ali.testing import Case, LibraryTests
from mpi_workers.failures import Failure
from mpi_workers.local import local_gang
from mpi_workers.matrix.layout import number_of
from tests.support import launches
from tests.support.build import (
    ADDRESS_SANITIZER,
    needs_compiler,
    shared_object,
    under_address_sanitizer,
)
from tests.support.suite import scaled

pytestmark = needs_compiler
SOURCES = Path(__file__).parent / "native"
A = np.arange(30.0).reshape(10, 3)
VALUES: dict[str, Any] = {
    "i": -(2**63), "x": -0.0, "z": 1 - 2j, "flag": False, "text": "Grüße, 世界",
    "ints": [2**62, -1], "floats": [1.5, float("inf")], "flags": [],
    "texts": ["", "ä", "long " * 1000],
}  # fmt: skip
DEFAULTS = [3, 0.5, 1.5, True, "hello", [1, 2], [], [True, False], ["a", "b"]]
COMMON = (
    Case("echo", {"A": A, **VALUES}, [A, *VALUES.values()]),
    Case("echo", {"A": A}, [A, *DEFAULTS]),
    Case("echo", {"A": A[:, 0], **VALUES}, [A[:, 0], *VALUES.values()]),
    Case("echo", {"A": A[:0]}, [A[:0], *DEFAULTS]),
    Case("optional", {}, [False, -1]),
    Case("optional", {"A": A, "i": 5}, [True, 5]),
    Case("count", {}, None),
    Case("work", {"seconds": 0.02}, []),
    Case("fail", {"rank": -1}, raises="RoutineError: every.fail failed on rank"),
    Case("fail", {"how": "refuse"}, raises="BadArgumentError: every.fail: no such luck"),
    Case("fail", {"rank": 99}, []),
)


@functools.cache
def built(source: str, *flags: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="native-"))
    return shared_object(SOURCES / source, folder / "libevery.so", *flags)


class TestEverythingInC(LibraryTests):
    library = "every"
    sizes = scaled((3,), (1, 2, 3, 6))
    cases = (
        *COMMON,
        *(
            Case(
                "coordinates",
                {"m": 7, "n": n, "layout": number_of(layout)},
                [np.add.outer(1000 * np.arange(7), np.arange(n))],
            )
            for n, layout in ((2, "MC_MR"), (5, "BLOCK"), (5, "BLOCK_CYCLIC:2"), (5, "MC_STAR:3"))
        ),
        Case("coordinates", {"m": 2, "n": 2, "layout": 15}, raises="unknown layout 15"),
        Case("coordinates", {"m": 2, "n": 2, "layout": 15 | 4 << 8}, raises="unknown layout 1039"),
        Case("coordinates", {"m": 2, "n": 2, "layout": 0}, raises="unknown layout 0"),
        Case("about", {"A": A}, None),
        Case("descriptor", {"A": A}, raises="no descriptor"),
        Case("even", {"m": 7}, [np.arange(7) % 2 == 0]),
        Case("even", {"m": 1, "dimensions": 0}, [np.bool_(True)]),
        Case("even", {"m": 5, "dimensions": 2}, [np.arange(5)[:, None] % 2 == 0]),
        Case("even", {"m": 0}, [np.zeros(0, bool)]),
        Case("even", {"m": 2, "dimensions": 0}, raises="its result 'B' has 0 dimensions, and 2"),
        Case("even", {"m": 2, "dimensions": 3}, raises="its result 'B' has 3 dimensions"),
        Case("grow", {"A": A}, [], changed={"A": 2 * A}),
        Case("grow", {"A": A, "B": A[:2], "factor": 3 + 1j}, [], changed={"A": 3 * A}),
        Case("grow", {"A": A.astype("int32")}, raises="BadArgumentError: every.grow: A must be"),
        Case("work", {"words": True}, []),
        Case("at_rank_0", {}, ["from rank 0", 7]),
        Case("bad", {}, raises="its result 'A' is not a matrix of this call"),
        Case("fail", {"how": "silent"}, raises="it returned 77 without a message"),
        Case("echo", {"A": A, "text": "a\0b"}, raises="echo: its argument 'text' has a zero"),
    )

    @property
    def path(self) -> Path:
        return built("every.c")


K = scipy.sparse.random_array((7, 5), density=0.4, rng=np.random.default_rng(1), format="csr")


class TestSparseInC(LibraryTests):
    library = "sparse_in_c"
    sizes = scaled((3,), (1, 2, 3, 6))
    interruptible = False
    cases = (
        Case("scaled", {"A": K, "factor": 3.0}, [3 * K, K.sum(axis=1)]),
        Case("scaled", {"A": K.astype("int32")}, raises="BadArgumentError"),
        Case("scaled", {"A": scipy.sparse.csr_array((0, 4))}, [np.empty((0, 4)), np.empty(0)]),
        Case("columns", {"A": K}, [int(K.indices.max()), K]),
        Case("columns", {"A": scipy.sparse.csr_array((3, 2))}, [-1, np.zeros((3, 2))]),
        Case("broken", {}, raises="its result 'B' is not a sparse matrix: the starts"),
    )

    @property
    def path(self) -> Path:
        return built("sparse.c")


class TestSparseInCpp(LibraryTests):
    library = "sparse_in_cpp"
    sizes = scaled((1,), (1, 2, 3, 6))
    cases = (
        Case("scaled", {"A": K, "factor": 3.0}, [3 * K, K.sum(axis=1)]),
        Case("scaled", {"A": scipy.sparse.csr_array((3, 2))}, [np.zeros((3, 2)), np.zeros(3)]),
        Case("scaled", {"A": K.astype("int32")}, raises="a sparse matrix of float64, not of int32"),
    )

    @property
    def path(self) -> Path:
        return built("sparse.cpp")


class TestEverythingInCpp(LibraryTests):
    library = "every"
    sizes = scaled((2,), (1, 2, 3, 6))
    cases = (
        *COMMON,
        Case(
            "fill",
            {"m": 5, "n": 4},
            [np.add.outer(np.arange(5), 1j * np.arange(4)).astype("complex64")],
        ),
        Case("negative", {"A": A - 4}, [A < 4, np.arange(10) % 2 == 0]),
        Case("negative", {"A": A[:, 0] - 4}, [A[:, :1] < 4, np.arange(10) % 2 == 0]),
        Case("grow", {"A": A}, [], changed={"A": 2 * A}),
        Case("inverted", {"mask": A[:, 1] > 4}, [A[:, 1] <= 4]),
        Case("inverted", {"mask": A[:0] > 4}, [A[:0] <= 4]),
        Case("inverted", {"mask": A}, raises="it takes a matrix of bool, not of float64"),
        Case("fail", {"how": "odd"}, raises="not a std::exception"),
        Case("fail", {"rank": 2**40}, raises="argument 1: 1099511627776 is out of range"),
        Case("echo", {"A": A.astype("int32")}, raises="it takes a matrix of float64, not of int32"),
    )

    @property
    def path(self) -> Path:
        return built("every.cpp")


@pytest.mark.parametrize("ranks", scaled([1, 6], [1, 2, 3, 6]))
def test_a_matrix_is_described_as_it_is(ranks: int) -> None:
    assert launches.run("tests.ali.ranks_native:descriptions", ranks, str(built("every.c"))) == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_library_reads_a_part_on_the_gpu(ranks: int) -> None:
    pytest.importorskip("torch", reason="needs torch")
    told = launches.run("tests.ali.ranks_native:device_pointer", ranks, str(built("device.c")))
    assert told[:3] == [276.0, True, 1]
    assert told[3].startswith("no GPU is reserved for this rank")


def test_an_error_of_mpi_that_a_library_ignores_fails_the_call() -> None:
    careless, careful, total = local_gang.run(
        "tests.ali.ranks_native:mpi_errors", 2, str(built("mpi_errors.c"))
    )
    assert "careless on rank 0 ignored an error of MPI: Invalid rank" in careless
    assert "MPI_Isend" in careless
    assert careful == 1
    assert total == 2


def test_messages_of_a_call_that_ends_early_do_not_corrupt_the_heap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under AddressSanitizer, which ends a rank that touches freed memory."""
    for name, value in under_address_sanitizer().items():
        monkeypatch.setenv(name, value)
    library = built("halo.cpp", *ADDRESS_SANITIZER)
    turns = scaled(6, 100)
    sums = local_gang.run(
        "tests.ali.ranks_native:cancelled_messages", 3, str(library), turns, timeout=90
    )
    assert sums == [12.0] * turns


@pytest.mark.parametrize("ranks", scaled([1, 6], [1, 4, 6]))
def test_descriptors_in_c_are_those_in_python(ranks: int) -> None:
    done = launches.run("tests.ali.ranks_native:descriptors", ranks, str(built("every.c")))
    assert done == [[], 4 * 6 * ranks]


def test_state_lasts_from_call_to_call_and_is_given_up(tmp_path: Path) -> None:
    told = tmp_path / "closed"
    counts = local_gang.run("tests.ali.ranks_native:counts", 2, str(built("every.c")), str(told))
    assert counts == [1, 2, 3, 1]
    assert told.read_text().split() == ["3", "3"]  # both ranks', and none for the unused one


LIBRARY = """
#include <alchemist.h>
static int run(alchemist_call *c, const alchemist_value *i, alchemist_value *o)
{ (void)c; (void)i; (void)o; return 0; }
static const alchemist_routine routines[] = {%s {0}};
static const alchemist_library library = {%s, "x", "doc", %s, NULL};
ALCHEMIST_EXPORT const alchemist_library *%s(void) { return &library; }
"""
CPP = """
#include <alchemist.hpp>
static int64_t f(alchemist::Call &, int64_t x) { return x; }
ALCHEMIST_CPP_LIBRARY("x", "doc") { library.routine<f>("f", "doc", {{"x"}, {"y"}}, {{"z"}}); }
"""
GOOD = '{.name = "f", .doc = "f", .run = run},'
ENTRY = "alchemist_library_describe"


def library(
    routines: str = GOOD, abi: str = "ALCHEMIST_ABI", table: str = "routines", entry: str = ENTRY
) -> str:
    return LIBRARY % (routines, abi, table, entry)


def parameter(words: str) -> str:
    return library(f'{{.name = "f", .run = run, .parameters = ALCHEMIST_PARAMETERS({words})}},')


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (library(abi="ALCHEMIST_ABI + 1"), "built for ABI version 5; this is"),
        (library(entry="some_other_name"), f"undefined symbol: {ENTRY}"),
        (library(""), "declares no routine"),
        (library(table="NULL"), "declares no routine"),
        (library(GOOD * 2), "routine 'f' twice"),
        (library('{.name = "f"},'), "'f' has no function"),
        (library('{.name = "a b", .run = run},'), "'a b' cannot be the name"),
        (parameter('{"p", 12, ""}'), "'p' has the unknown type 12"),
        (
            parameter('{"p", ALCHEMIST_INT, "", "0.5"}'),
            "the default of 'p', '0.5', is not JSON for type int",
        ),
        (
            parameter('{"p", ALCHEMIST_MATRIX_WRITTEN, ""}, {"q", ALCHEMIST_MATRIX, ""}'),
            "declares changes of p: declare its other matrices too",
        ),
        (parameter('{"p", ALCHEMIST_INT, "", "{"}'), "is not JSON for type int"),
        (
            parameter('{"p", ALCHEMIST_INT, ""}, {"p", ALCHEMIST_INT, ""}'),
            "repeats the name of a parameter: p, p",
        ),
        (CPP, "declare one name, an identifier, for each"),
    ],
)
def test_a_library_that_will_not_do_says_why(tmp_path: Path, code: str, words: str) -> None:
    source = tmp_path / ("x.cpp" if code == CPP else "x.c")
    source.write_text(code)
    path = shared_object(source, tmp_path / "libx.so", "-Wno-unused")
    with pytest.raises(Failure, match=words) as caught:
        NativeLibrary("x", path)
    assert caught.value.kind == "LibraryLoadError"
    assert caught.value.message.startswith("library 'x': ")


def test_what_a_routine_changes_is_described() -> None:
    for source in ("every.c", "every.cpp"):
        described = NativeLibrary("every", built(source)).describe()["routines"]
        writes = {about["name"]: about["writes"] for about in described}
        assert writes["grow"] == ["A"]
        assert writes["count"] is None
        assert writes["echo"] == (None if source == "every.c" else [])  # types tell it in C++


@pytest.mark.parametrize("foreign", ["libmpi.so.40", "libopen-pal.so.80"])
@pytest.mark.parametrize("search", ["RUNPATH", "LD_LIBRARY_PATH"])
@pytest.mark.parametrize("between", [(), ("libsolver.so.3", "libwrapper.so")])
def test_a_library_of_another_mpi_is_refused_at_any_distance(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    foreign: str,
    search: str,
    between: tuple[str, ...],
) -> None:
    flags = ["-Wl,--no-as-needed", f"-L{tmp_path}"]
    if search == "RUNPATH":
        flags.append("-Wl,-rpath,$ORIGIN")
    else:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    source = tmp_path / "x.c"
    source.write_text("int nothing;\n")
    below = shared_object(source, tmp_path / foreign, f"-Wl,-soname,{foreign}")
    for name in between:
        own = [*flags, f"-l:{below.name}", f"-Wl,-soname,{name}"]
        below = shared_object(source, tmp_path / name, *own)
    source.write_text(library())
    path = shared_object(source, tmp_path / "libx.so", *flags, f"-l:{below.name}")
    words = " through ".join([f"is linked to {foreign}", *between])
    with pytest.raises(Failure, match=re.escape(f"{words}, but this gang runs on MPICH")):
        load("x", str(path))


def test_a_library_that_opens_another_mpi_by_itself_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "x.c"
    source.write_text("int nothing;\n")
    other = shared_object(source, tmp_path / "libmpi.so.40", "-Wl,-soname,libmpi.so.40")
    source.write_text(
        "#include <dlfcn.h>\n"
        + library()
        + "__attribute__((constructor)) static void start(void) "
        + f'{{ dlopen("{other}", RTLD_NOW); }}\n'
    )
    path = shared_object(source, tmp_path / "libx.so", "-ldl")
    said = local_gang.run("tests.ali.ranks_native:refusals", 1, str(path))
    assert [f"has loaded a second MPI, {other}" in words for words in said] == [True, True]
    python = tmp_path / "x.py"
    python.write_text(
        "import ctypes\nfrom ali import Context, routine\n"
        f"ctypes.CDLL({str(other)!r})\n"
        "@routine()\ndef nothing(ctx: Context) -> None: ...\n"
    )
    said = local_gang.run("tests.ali.ranks_native:refusals", 1, str(python))
    assert [f"{python} has loaded a second MPI" in words for words in said] == [True, True]


def test_a_missing_dependency_is_named(tmp_path: Path) -> None:
    source = tmp_path / "x.c"
    source.write_text("int nothing;\n")
    shared_object(source, tmp_path / "libgone.so", "-Wl,-soname,libgone.so")
    source.write_text(
        library() + "extern int nothing;\nint *something(void) { return &nothing; }\n"
    )
    path = shared_object(source, tmp_path / "libx.so", f"-L{tmp_path}", "-lgone")
    (tmp_path / "libgone.so").unlink()
    with pytest.raises(Failure, match=r"libgone\.so: cannot open shared object file"):
        load("x", str(path))


def test_a_rebuilt_library_is_opened_again(tmp_path: Path) -> None:
    source, path = tmp_path / "x.c", tmp_path / "libx.so"
    for name in ("first", "second", "third"):
        routine = f'{{.name = "{name}", .doc = "", .run = run}},'
        source.write_text(library(routine))
        path.unlink(missing_ok=True)
        shared_object(source, path)
        for _ in range(2):
            assert [r["name"] for r in load("x", str(path)).describe()["routines"]] == [name]


def test_a_library_whose_file_was_overwritten_is_refused(tmp_path: Path) -> None:
    given = str(built("every.c")), str(tmp_path)
    for text in local_gang.run("tests.ali.ranks_native:overwritten", 1, *given):
        assert "libx.so was written to after it was loaded" in text


def test_waits_of_native_code_are_counted_as_time_in_mpi() -> None:
    assert local_gang.run("tests.ali.ranks_native:waits", 2, str(built("every.c"))) == [False, True]
