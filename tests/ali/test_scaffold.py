"""A new library works as it comes: it builds, and passes the conformance suite."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import RoutineError
from ali import scaffold
from tests.support import build
from tests.support.build import ADDRESS_SANITIZER, needs_compiler, under_address_sanitizer
from tests.support.suite import LONG

needs_fortran = pytest.mark.skipif(
    shutil.which("gfortran") is None, reason="needs gfortran (apt-get install gfortran)"
)
needs_cmake = pytest.mark.skipif(
    shutil.which("cmake") is None, reason="needs cmake (apt-get install cmake)"
)
ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """Run a command as a user whose environment is active; what it printed."""
    # Without what the make around the tests was told: it would hold for the library's too.
    strange = ("PYTEST_", "MAKE", "MFLAGS", "PYTHON")
    env = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["PYTHONPATH"] = str(ROOT)
    return build.run(*command, cwd=cwd, code=code, env=env)


def new(folder: Path, language: str, *options: str) -> Path:
    said = run("alchemist", "new-library", "my_lib", "--language", language, *options, cwd=folder)
    assert "my_lib/README.md" in said
    texts = [path.read_text() for path in (folder / "my_lib").iterdir()]
    assert not [text for text in texts if "@" in text.replace("@routine", "").replace("$@", "")]
    return folder / "my_lib"


languages = pytest.mark.parametrize(
    "language",
    ["c", pytest.param("cpp", marks=needs_cmake), pytest.param("fortran", marks=needs_fortran)],
)


def make(folder: Path, language: str, flags: str = "") -> str:
    """Build a library as its README says; what was printed."""
    if language == "cpp":
        return run("cmake", "-B", "build", f"-DCMAKE_CXX_FLAGS={flags}", cwd=folder) + run(
            "cmake", "--build", "build", cwd=folder
        )
    own = [f"{name}={flags}" for name in ("CFLAGS", "FFLAGS", "LDFLAGS")] if flags else []
    return run("make", "--always-make", *own, cwd=folder)


@needs_compiler
@languages
def test_a_library_builds_and_passes_its_tests(language: str, tmp_path: Path) -> None:
    """One of them under AddressSanitizer, as its README says: in `make test-long` all."""
    folder = new(tmp_path, language)
    assert "warning" not in make(folder, language).lower()
    command = ["python", "-m", "pytest"]
    if language == "fortran" or LONG:
        make(folder, language, " ".join(ADDRESS_SANITIZER))
        variables = under_address_sanitizer()
        command = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    assert "passed" in run(*command, cwd=folder)


@needs_compiler
@languages
def test_a_simulator_builds_and_passes_its_tests(language: str, tmp_path: Path) -> None:
    folder = new(tmp_path, language, "--simulator")
    if language == "cpp":
        said = make(folder, language) + run("python", "-m", "pytest", cwd=folder)
    else:
        said = run("make", "test", cwd=folder)
    assert "15 passed, 3 skipped" in said
    assert "warning" not in said.lower()


FORTRAN_RING = """
  function summed(call, in, out) bind(c) result(code)
    type(c_ptr), value :: call
    type(alchemist_value), intent(in) :: in(*)
    type(alchemist_value), intent(inout) :: out(*)
    integer(c_int) :: code
    real(c_double) :: mine(2), left(2), found(1)
    mine = [1d0, 2d0] + alchemist_rank(call)
    left = -1
    code = alchemist_exchange(call, mine, alchemist_rank(call) + 1, left, alchemist_rank(call) - 1)
    if (code /= ALCHEMIST_OK) return
    found = left(1) + 100 * left(2)
    code = alchemist_allreduce(call, found, ALCHEMIST_SUM)
    if (code == ALCHEMIST_OK) call alchemist_set(out(1), found(1))
  end function

  function describe("""


FORTRAN_SPARSE = """
  function summed(call, in, out) bind(c) result(code)
    type(c_ptr), value :: call
    type(alchemist_value), intent(in) :: in(*)
    type(alchemist_value), intent(inout) :: out(*)
    integer(c_int) :: code
    type(alchemist_sparse), pointer :: A, B
    real(c_double), pointer :: x(:), y(:)
    integer(c_int64_t) :: i
    A => alchemist_sparse_of(in(1))
    code = ALCHEMIST_FAILED_CODE
    B => alchemist_new_sparse(call, A%rows, A%cols, A%local_elements, A%dtype)
    if (.not. associated(B)) return
    call c_f_pointer(A%data, x, [A%local_elements])
    call c_f_pointer(B%data, y, [B%local_elements])
    y = 2 * x
    do i = 0, A%local_rows
      call alchemist_set_start(B, i, alchemist_start(A, i))
    end do
    do i = 0, A%local_elements - 1
      call alchemist_set_column(B, i, alchemist_column(A, i))
    end do
    call alchemist_set(out(1), B)
    code = ALCHEMIST_OK
  end function

  function describe("""
FORTRAN_SPARSE_CASE = """
import numpy as np
import scipy.sparse as sp
from ali.testing import Case, LibraryTests

A = sp.random_array((7, 5), density=0.4, rng=np.random.default_rng(0), format="csr")

class TestSparse(LibraryTests):
    library = "my_lib"
    path = "libmy_lib.so"
    sizes = (1, 3)
    interruptible = False
    cases = (
        Case("total", {"A": A}, [2 * A]),
        Case("total", {"A": sp.csr_array((2, 2))}, [np.zeros((2, 2))]),
        Case("scale", {"A": np.ones((2, 2))}, [np.full((2, 2), 2.0)]),
    )
"""


@needs_compiler
@needs_fortran
def test_sparse_matrices_in_fortran(tmp_path: Path) -> None:
    folder = new(tmp_path, "fortran")
    (source,) = folder.glob("*.f90")
    text = source.read_text()
    start, end = text.index("  function summed("), text.index("  function describe(")
    text = text[:start] + FORTRAN_SPARSE.strip("\n") + text[end + len("  function describe(") :]
    first, last = text.rsplit("call alchemist_routine", 1)
    for kind in ("MATRIX_READ", "FLOAT"):
        last = last.replace(f"ALCHEMIST_{kind}_TYPE", "ALCHEMIST_SPARSE_TYPE")
    source.write_text(f"{first}call alchemist_routine{last}")
    run("make", f"lib{source.stem}.so", cwd=folder)
    for test in folder.glob("test_*.py"):
        test.write_text(FORTRAN_SPARSE_CASE)
    assert "passed" in run(sys.executable, "-m", "pytest", "-q", cwd=folder)


@needs_compiler
@needs_fortran
def test_neighbours_exchange_edges_in_fortran(tmp_path: Path) -> None:
    folder = new(tmp_path, "fortran")
    (source,) = folder.glob("*.f90")
    text = source.read_text()
    start, end = text.index("  function summed("), text.index("  function describe(")
    source.write_text(
        text[:start] + FORTRAN_RING.strip("\n") + text[end + len("  function describe(") :]
    )
    library = f"lib{source.stem}.so"
    run("make", library, cwd=folder)
    np.save(folder / "A.npy", np.zeros((2, 2)))
    words = (sys.executable, "-m", "ali", "run-routine", library, "total", "A.npy", "--ranks", "3")
    assert "sum = 402.0" in run(*words, cwd=folder)  # rank 0 keeps -1, -1; 1 has 1, 2; 2 has 2, 3


# It does not call MPI: the matrices are parts of the rank that started it.
FORTRAN_PROGRAM = """
program sums
  use alchemist
  implicit none
  type(alchemist_matrix) :: A, S
  real(c_double), pointer :: x(:, :), y(:, :)
  if (alchemist_attach("A", ALCHEMIST_FLOAT64, ALCHEMIST_VC_STAR, A) /= ALCHEMIST_OK) call give_up()
  if (alchemist_create("S", A%rows, 1_c_int64_t, 1, ALCHEMIST_FLOAT64, ALCHEMIST_VC_STAR, S) &
      /= ALCHEMIST_OK) call give_up()
  call alchemist_local(A, x)
  call alchemist_local(S, y)
  y(:, 1) = sum(x, dim=2)
contains
  subroutine give_up()
    print *, alchemist_client_error()
    stop 4
  end subroutine
end program
"""


@needs_compiler
@needs_fortran
def test_a_program_in_fortran_uses_matrices(cluster: str, tmp_path: Path) -> None:
    include = scaffold.include_directory()
    (tmp_path / "sums.f90").write_text(FORTRAN_PROGRAM)
    mpicc, shim = scaffold.mpi_compiler("mpicc"), include / "alchemist_fortran.c"
    run(mpicc, "-c", f"-I{include}", shim, cwd=tmp_path)

    def build_program() -> None:
        run("gfortran", "-c", include / "alchemist.f90", "sums.f90", cwd=tmp_path)
        objects = ("sums.o", "alchemist.o", "alchemist_fortran.o")
        run(mpicc, "-o", "sums", *objects, "-lgfortran", "-lm", cwd=tmp_path)

    build_program()
    with AlchemistSession(2) as als:
        A = als.send_matrix(np.arange(12.0).reshape(4, 3))
        made = als.run_program([tmp_path / "sums"], matrices={"A": A}).matrices
        np.testing.assert_array_equal(made["S"].fetch(), [3, 12, 21, 30])
        with pytest.raises(RoutineError, match="exited with code 4"):
            als.run_program([tmp_path / "sums"])
        run("sed", "-i", 's/"A", ALCHEMIST_FLOAT64/"A", ALCHEMIST_ANY/', "sums.f90", cwd=tmp_path)
        build_program()
        words = "alchemist_local: the array is of float64, and the matrix has dtype 1: compare"
        with pytest.raises(RoutineError, match=words):
            als.run_program([tmp_path / "sums"], matrices={"A": A.astype("float32")})


@needs_compiler
@pytest.mark.parametrize("language", ["c", pytest.param("cpp", marks=needs_cmake), "python"])
def test_a_library_of_sparse_matrices_builds_and_passes_its_tests(
    language: str, tmp_path: Path
) -> None:
    folder = new(tmp_path, language, "--sparse")
    if language != "python":
        assert "warning" not in make(folder, language).lower()
    assert "passed" in run("python", "-m", "pytest", cwd=folder)


def test_a_simulator_has_no_sparse_matrices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"C, C\+\+ or Python"):
        scaffold.new_library("my_lib", "fortran", tmp_path, sparse=True)


def test_in_python(tmp_path: Path) -> None:
    folder = new(tmp_path, "python")
    assert "passed" in run("python", "-m", "pytest", cwd=folder)


def test_a_simulator_in_python_whose_faults_are_found(tmp_path: Path) -> None:
    folder = new(tmp_path, "python", "--simulator")
    assert "15 passed, 3 skipped" in run("python", "-m", "pytest", cwd=folder)
    source = folder / "my_lib.py"
    text = source.read_text()
    for right, wrong, words in (
        ("default_rng(seed)", "default_rng()", "episodes with the same seed differ: after reset"),
        ("default_rng(seed)", "default_rng(3)", "the seeds 1 and 2 are equal"),
        ("+ 0.25 *", "+ 0.25 * ctx.size *", "2 ranks differ from 1: in step 1. Sums"),
        ("heat.mean()]", "heat.mean() / (ctx.size - 1)]", "reset|scores is not finite"),
    ):
        assert text.count(right) == 1
        source.write_text(text.replace(right, wrong))
        said = run("python", "-m", "pytest", "-x", cwd=folder, code=1)
        assert any(word in said for word in words.split("|")), said


def test_what_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "my_lib").mkdir()
    said = run("alchemist", "new-library", "my_lib", cwd=tmp_path, code=1)
    assert said == f"alchemist: {tmp_path / 'my_lib'} already exists: nothing in it was changed\n"
    assert list((tmp_path / "my_lib").iterdir()) == []


@pytest.mark.parametrize("name", ["my-lib", "1st", "Mine", "class", "../mine", "é", ""])
def test_a_name_must_be_one_of_a_module(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid library name"):
        scaffold.new_library(name, "c", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["linalg", "numpy"])
def test_a_name_must_not_mean_something_else(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="choose another"):
        scaffold.new_library(name, "python", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"the folder .* does not exist"):
        scaffold.new_library("mine", "python", tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_language_must_be_known(tmp_path: Path) -> None:
    said = run("alchemist", "new-library", "x", "--language", "cobol", cwd=tmp_path, code=2)
    assert "invalid choice: 'cobol'" in said


def test_the_header_is_where_it_is_said_to_be(tmp_path: Path) -> None:
    assert (Path(run("alchemist", "include", cwd=tmp_path).strip()) / "alchemist.h").is_file()
