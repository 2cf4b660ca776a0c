"""From a typed function to a routine: what is declared, what is called, what comes back."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ali import Context, DistMatrix, echo, routine
from ali.interface import describe
from ali.native.host import TYPES
from ali.python_library import PythonLibrary
from mpi_workers.failures import Failure
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.layout import LAYOUTS, layout_of, number_of
from mpi_workers.protocol import signature as wire
from mpi_workers.protocol.signature import Signature
from tests.support import launches
from tests.support.layouts import SOME_LAYOUTS

RANKS = "tests.ali.ranks_interface:"


def library(*functions: Callable[..., Any], **names: Any) -> PythonLibrary:
    module = types.ModuleType("a_module", "What it is for.")
    vars(module).update({f.__name__: f for f in functions}, **names)
    return PythonLibrary("mine", module)


def call(lib: PythonLibrary, name: str, **arguments: Any) -> list[Any]:
    """Call on a gang that the routine does not use."""
    gang = types.SimpleNamespace(rank=0, size=1, grid=(1, 1))
    return lib.call(gang, name, arguments)


def test_every_type_of_parameter_and_result_is_described() -> None:
    kinds = ["int", "float", "complex", "bool", "string"]
    kinds += [f"list[{kind}]" for kind in ("int", "float", "bool", "string")]
    signature = echo.echo.__alchemist__
    assert [p.type for p in signature.parameters] == ["matrix", *kinds]
    assert [r.type for r in signature.results] == ["matrix", *kinds]
    assert [r.name for r in signature.results] == [p.name for p in signature.parameters]
    assert signature.doc.startswith("Return every parameter unchanged")


def test_a_signature_says_what_the_function_says() -> None:
    @routine("C", "error")
    def f(
        ctx: Context, A: DistMatrix, tol: float = 0.5, seed: int | None = None
    ) -> tuple[DistMatrix, float]:
        """Do it.

        In two paragraphs.
        """
        raise NotImplementedError

    signature = f.__alchemist__
    assert str(signature) == (
        "f(A: matrix, tol: float = 0.5, seed: int = None) -> C: matrix, error: float"
    )
    assert signature.doc == "Do it.\n\nIn two paragraphs."


def no_context() -> None: ...
def no_type(ctx: Context, x) -> None: ...
def a_dict(ctx: Context, x: dict[str, int]) -> None: ...
def matrices(ctx: Context, x: list[DistMatrix]) -> None: ...
def an_array(ctx: Context, x: np.ndarray[Any, Any]) -> None: ...
def a_union(ctx: Context, x: int | str = 1) -> None: ...
def half_optional(ctx: Context, x: int | None = 3) -> None: ...
def several(ctx: Context, *n: int) -> None: ...
def one(ctx: Context) -> int:
    return 1


@pytest.mark.parametrize(
    ("function", "results", "what"),
    [
        (no_context, (), "must be the Context"),
        (no_type, (), "parameter 'x' has no annotation"),
        (a_dict, (), "a_dict: parameter 'x': dict[str, int] cannot be the type of a parameter"),
        (matrices, (), "cannot be the type of a parameter"),
        (an_array, (), "cannot be the type of a parameter"),
        (a_union, (), "the only supported union is `T | None = None`"),
        (several, (), "must be named, without *"),
        (half_optional, (), "the only supported union is `T | None = None`"),
        (one, (), "returns 1 values but names 0 results"),
        (one, ("a", "b"), "returns 1 values but names 2 results"),
    ],
)
def test_what_cannot_travel_is_refused_where_it_is_declared(
    function: Callable[..., Any], results: tuple[str, ...], what: str
) -> None:
    with pytest.raises(TypeError) as error:
        describe(function, results)
    assert what in str(error.value)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ({"writes": ("X",)}, "name X, which is not a matrix"),
        ({"writes": ("n",)}, "name n, which is not a matrix"),
        ({"like": {"B": "X"}}, "name X, which is not a matrix"),
        ({"like": {"X": "A"}}, "name X, which is not a matrix"),
        ({"vectors": ["A"]}, "name A, which is not a matrix"),
    ],
)
def test_names_of_matrices_that_a_routine_does_not_have(names: Any, what: str) -> None:
    def f(ctx: Context, A: DistMatrix, n: int) -> DistMatrix:
        return A

    with pytest.raises(TypeError, match=what):
        routine("B", **names)(f)


def test_a_decorator_without_parentheses_is_refused() -> None:
    with pytest.raises(TypeError, match="takes the names of the results"):
        routine(one)  # type: ignore[arg-type]


def test_a_library_is_the_routines_of_its_module() -> None:
    @routine()
    def nothing(ctx: Context) -> None:
        """Nothing."""

    about = library(nothing, helper=one, number=3).describe()
    assert about["name"] == "mine"
    assert about["doc"] == "What it is for."
    assert [Signature.from_map(fields).name for fields in about["routines"]] == ["nothing"]


def test_a_module_without_routines_is_not_a_library() -> None:
    with pytest.raises(Failure, match="declares no routine") as error:
        library(one)
    assert error.value.kind == "LibraryLoadError"


def test_results_are_coerced_to_what_is_declared() -> None:
    @routine("n", "x", "items")
    def f(ctx: Context) -> tuple[int, float, list[int]]:
        return np.int32(1), np.float32(0.5), np.arange(2)

    values = call(library(f), "f")
    assert values == [1, 0.5, [0, 1]]
    assert [type(v) for v in values] == [int, float, list]


def test_a_routine_without_results_gives_none() -> None:
    @routine()
    def f(ctx: Context) -> None:
        return None

    assert call(library(f), "f") == []


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ((1, 2), "returned 2 values, but declares 3"),
        (1, "returned 1 values, but declares 3"),
        ((1, 2.5, 3), "declares its result 'b' as int, but returned float"),
        ((1, 2, 3), "declares its result 'C' as matrix, but returned int"),
    ],
)
def test_a_routine_that_breaks_its_word_is_told_so(returned: Any, what: str) -> None:
    @routine("a", "b", "C")
    def f(ctx: Context) -> tuple[int, int, DistMatrix]:
        return returned

    with pytest.raises(Failure, match=what) as error:
        call(library(f), "f")
    assert error.value.kind == "RoutineError"


def test_an_unknown_routine_is_answered_with_the_known() -> None:
    @routine()
    def f(ctx: Context) -> None: ...

    with pytest.raises(Failure, match="no routine 'g'; it has f") as error:
        call(library(f), "g")
    assert error.value.kind == "NoSuchRoutineError"


def test_state_lives_from_call_to_call_until_the_library_is_closed() -> None:
    closed: list[dict[str, Any]] = []

    @routine("n")
    def count(ctx: Context) -> int:
        n: int = ctx.state.get("n", 0) + 1
        ctx.state["n"] = n
        return n

    lib = library(count, close=lambda state: closed.append(dict(state)))
    assert [call(lib, "count") for _ in range(3)] == [[1], [2], [3]]
    lib.close()
    assert closed == [{"n": 3}]
    assert call(lib, "count") == [1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_context_makes_matrices_that_are_spread_over_the_gang(ranks: int) -> None:
    assert launches.run(RANKS + "matrices", ranks) == {
        "zeros": True,
        "empty_like": ["MC_MR", [5, 7], "int32"],
        "rows": [[float(10 * (i % ranks)) + i for _ in range(3)] for i in range(5)],
        "few rows": [[float(i)] * 2 for i in range(2)],
        "replicated": True,
        "vector": [4, 1],
        "wrong rows": ranks,
        "unknown layout": ranks,
        "unknown dtype": ranks,
    }


def test_the_example_in_the_documentation_runs() -> None:
    assert launches.run(RANKS + "documented", 2) == [True, True]


def test_echo_runs_on_the_ranks() -> None:
    assert launches.run(RANKS + "run_echo", 2) == {
        "who": [0, 1],
        "same matrix": True,
        "values": True,
    }


def test_the_conformance_tests_are_an_attribute_of_the_package() -> None:
    program = "import ali; print(ali.testing.LibraryTests.__name__, hasattr(ali, 'tests'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.split() == [b"LibraryTests", b"False"]


def test_the_twins_of_the_header_agree_with_the_rest() -> None:
    header = (Path(__file__).parents[2] / "ali/include/alchemist.h").read_text()
    for i, name in enumerate(DTYPES, 1):
        code = "BOOL8" if name == "bool" else name.upper()
        assert f"ALCHEMIST_{code} = {i}" in header
    for i, name in enumerate(LAYOUTS, 1):
        assert f"ALCHEMIST_{name} = {i}" in header
        assert number_of(name) == i
    fortran = (Path(__file__).parents[2] / "ali/include/alchemist.f90").read_text()
    assert f"ALCHEMIST_BLOCK = {number_of('BLOCK')}" in fortran
    assert f"ALCHEMIST_ROW_BLOCKS = {number_of('VC_STAR:BLOCK')}" in fortran
    for name in SOME_LAYOUTS:
        assert layout_of(number_of(name)) == name
    assert set(TYPES) == set(wire.TYPES) - {"list[complex]", "bytes", "list[bytes]"}
