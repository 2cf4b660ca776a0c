"""A name becomes a library, or a failure that says where to look."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from ali import registry
from ali.registry import load
from mpi_workers.failures import Failure
from mpi_workers.local import local_gang
from mpi_workers.protocol.signature import Signature
from tests.support import launches
from tests.support.build import needs_compiler, shared_object

EXAMPLE = Path(__file__).parent / "native" / "spring.c"
SOURCE = '''"""A library."""
from ali import Context, routine

@routine("n")
def answer(ctx: Context) -> int:
    return {answer}
'''


def written(path: Path, answer: object) -> str:
    """A library in a file, whose routine gives this answer."""
    path.write_text(SOURCE.format(answer=answer))
    return str(path)


def answer(library: Any) -> int:
    gang = types.SimpleNamespace(rank=0, size=1, grid=(1, 1))
    return library.call(gang, "answer", {})[0]


@pytest.fixture(autouse=True)
def _forget_modules() -> Iterator[None]:
    yield
    for name in ("alchemist_library_mine", "some_installed_module", "plugged_in"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", sorted(registry.SHIPPED))
def test_what_is_shipped_loads_and_documents_every_routine(name: str) -> None:
    about = launches.run("tests.ali.ranks_native:described", 1, name)  # native parts want a rank
    if about.get("kind") == "LibraryNotFoundError":
        pytest.skip(about["message"])
    assert about["name"] == name
    assert about["doc"]
    assert [fields["name"] for fields in about["routines"] if not fields["doc"]] == []


@pytest.mark.parametrize("name", ["linalg", "scalapack", "elemental"])
def test_the_same_routine_has_the_same_results_in_every_library(name: str) -> None:
    """The contract of the design: one name, one order of results, whatever is behind it."""
    module = importlib.import_module(registry.SHIPPED[name])
    declared = [getattr(f, "__alchemist__", None) for f in vars(module).values()]
    found = {s.name: [r.name for r in s.results] for s in declared if isinstance(s, Signature)}
    contract = {
        "matmul": ["C"], "svd": ["S", "U", "V"], "svdvals": ["S"], "qr": ["Q", "R"],
        "eigh": ["W", "V"], "cholesky": ["L"], "solve": ["X"], "lstsq": ["X"], "norm": ["norm"],
    }  # fmt: skip
    if name == "linalg":
        contract |= {"truncated_svd": ["S", "U", "V"], "gram": ["G"], "transpose": ["B"]}
    assert {routine: found.get(routine) for routine in contract} == contract
    taken = {s.name: [p.name for p in s.parameters] for s in declared if isinstance(s, Signature)}
    assert {taken[routine][0] for routine in contract} == {"A"}
    assert taken["matmul"] == ["A", "B", "transpose_a", "transpose_b"]
    assert taken["norm"] == ["A", "ord"]


@pytest.mark.parametrize("name", ["linalg", "scalapack", "elemental", "sparse"])
def test_linear_algebra_is_pure(name: str) -> None:
    """Else a call is not repeated after a loss, and a failed one makes its arguments stale."""
    assert importlib.import_module(registry.SHIPPED[name]).PURE


def test_a_file_becomes_a_library(tmp_path: Path) -> None:
    library = load("mine", written(tmp_path / "mine.py", 42))
    assert answer(library) == 42
    assert library.describe()["doc"] == "A library."


def test_an_edited_file_is_read_again_even_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    found = []
    for number in range(3):
        written(path, number)
        os.utime(path, (1e9, 1e9))  # the same second
        found.append(answer(load("mine", str(path))))
    assert found == [0, 1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.py"]


def test_a_file_is_compiled_on_its_own_terms(tmp_path: Path) -> None:
    """Annotations are strings only where the file asks for it."""
    path = written(tmp_path / "mine.py", "len(str(answer.__annotations__['return']))")
    assert answer(load("mine", path)) == len(str(int))


def test_a_library_may_use_dataclasses(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n"
        + SOURCE.format(answer="Pair(1, 2).b")
        + "from dataclasses import dataclass\n@dataclass\nclass Pair:\n    a: int\n    b: int\n"
    )
    assert answer(load("mine", str(path))) == 2


NOT_FOUND, NOT_LOADED = "LibraryNotFoundError", "LibraryLoadError"
SHIPPED = r"no library .*Shipped: .*path/to/it\.py"


@pytest.mark.parametrize(
    ("name", "file", "words", "kind"),
    [
        ("mine", "gone.py", r"no file .*gone\.py on node .*every node", NOT_FOUND),
        ("mine", "gone.so", "there is no file", NOT_FOUND),
        ("mine", "empty.so", r"the loader cannot open it: .*empty\.so: file too short", NOT_LOADED),
        ("mine", "text.so", r"the loader cannot open it: .*text\.so: file too short", NOT_LOADED),
        ("mine", "mine.txt", "neither a Python file", NOT_LOADED),
        ("nowhere_to_be_found", None, SHIPPED, NOT_FOUND),
        ("nowhere.at.all", None, SHIPPED, NOT_FOUND),
        ("", None, SHIPPED, NOT_FOUND),
        (".relative", None, SHIPPED, NOT_FOUND),
        ("json", None, "declares no routine", NOT_LOADED),
    ],
)
def test_what_is_no_library_is_refused(
    tmp_path: Path, name: str, file: str | None, words: str, kind: str
) -> None:
    for other, content in (("mine.txt", "x"), ("empty.so", ""), ("text.so", "not an object")):
        (tmp_path / other).write_text(content)
    with pytest.raises(Failure, match=words) as error:
        load(name, file and str(tmp_path / file))
    assert error.value.kind == kind


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("import not_there_at_all", "ModuleNotFoundError"),
        ("x = 1", "declares no routine"),
        (
            "from ali import routine, Context\n@routine()\ndef f(c: Context, x: set) -> None: ...",
            "cannot be the type of a parameter",
        ),
    ],
)
def test_a_file_that_fails_is_reported_with_its_own_error(
    tmp_path: Path, source: str, what: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(Failure, match=what) as error:
        load("mine", str(path))
    assert error.value.kind == NOT_LOADED
    if what != "declares no routine":
        assert "mine.py" in error.value.facts["traceback"]
        assert "alchemist_library_mine" not in sys.modules


def test_a_file_that_fails_leaves_the_loaded_library_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    library, module = load("mine", written(path, 1)), sys.modules["alchemist_library_mine"]
    path.write_text("1 / 0")
    with pytest.raises(Failure, match="ZeroDivisionError"):
        load("mine", str(path))
    assert sys.modules["alchemist_library_mine"] is module
    assert answer(library) == 1


def test_an_importable_module_is_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "some_installed_module.py", 7)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert answer(load("some_installed_module")) == 7


def test_an_entry_point_is_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "plugged_in.py", 8)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = EntryPoint("plug", "plugged_in", registry.ENTRY_POINTS)
    monkeypatch.setattr(
        registry, "entry_points", lambda group, name=None: [entry] if name in (None, "plug") else []
    )
    assert answer(load("plug")) == 8
    with pytest.raises(Failure, match="Installed: plug"):
        load("other")


def test_a_name_that_two_packages_declare_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in ("one", "two"):
        written(tmp_path / f"{package}.py", 8)
        about = tmp_path / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            f"[alchemist.libraries]\nmine_{package} = {package}\nmine = {package}\n"
        )
    assert answer(load("mine_two")) == 8
    with pytest.raises(Failure, match=r"several installed packages: one, two\.") as error:
        load("mine")
    assert error.value.kind == NOT_LOADED


@needs_compiler
def test_an_entry_point_may_say_where_a_shared_object_is(tmp_path: Path) -> None:
    built = shared_object(EXAMPLE, tmp_path / "libexample.so")
    about = local_gang.run("tests.ali.ranks_native:plugged_in", 2, str(built))
    assert about["name"] == "plug"
    assert about["calls"] == 1
    gone = local_gang.run("tests.ali.ranks_native:plugged_in", 1, str(tmp_path / "gone.so"))
    assert gone["kind"] == "LibraryNotFoundError"
