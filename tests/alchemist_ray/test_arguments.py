"""Wrong arguments are refused by name, with what is allowed; nothing is left of the call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from alchemist_ray import AlchemistSession, mpi_function
from alchemist_ray.arrays.saving import as_path
from alchemist_ray.attached.options import AttachOptions, GangOptions
from alchemist_ray.cluster.placement import within
from alchemist_ray.errors import (
    BadArgumentError,
    DtypeError,
    LayoutError,
    MatrixError,
    ResourceError,
    RoutineError,
    SessionError,
    ShapeError,
)

A = np.arange(12.0).reshape(3, 4)
NAN = math.nan
Wrong = tuple[Callable[..., Any], type[Exception], str]

# Options of a session: nothing is started for any of them.
OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"worker": 3}, TypeError, r"^AlchemistSession has no option 'worker'.*'num_workers'\?"),
    ({"ranks": 3}, TypeError, r"AlchemistSession has no option 'ranks'\. Options: num_workers, "),
    ({"num_workers": np.array([1, 2])}, ResourceError, "num_workers=array"),
    *(
        ({"num_workers": wrong}, ResourceError, f"num_workers={wrong!r}: it must be a whole number")
        for wrong in (0, -1, 2.5, "3", True)
    ),
    *(
        ({"num_workers": wrong}, ResourceError, "num_workers")
        for wrong in ((0, 2), (3, 2), (1, 2, 3), (1,), (1.5, 2), (1, "2"))
    ),
    ({"num_workers": (1, 2), "placement": "inherit"}, ResourceError, "placement='own'"),
    *(({"max_failures": wrong}, ValueError, "max_failures") for wrong in (-1, 1.5, True, "3")),
    ({"strategy": "NEAR"}, ValueError, r"strategy must be one of PACK, SPREAD.*; got 'NEAR'"),
    ({"strategy": "SPREAD", "placement": "inherit"}, ValueError, "the CPUs are reserved already"),
    ({"lifetime": "detached"}, ValueError, "requires name="),
    ({"lifetime": "forever"}, ValueError, "one of process, detached"),
    ({"name": "a/b"}, SessionError, "letters"),
    ({"name": ""}, SessionError, "letters"),
    ({"name": "x", "idle_timeout_s": 0}, ValueError, "idle_timeout_s=0: it must be a number"),
    ({"name": "x", "lifetime": "detached", "placement": "inherit"}, ValueError, "placement"),
    ({"placement": "elsewhere"}, ValueError, "placement"),
    ({"launcher": "rsh"}, ValueError, "launcher"),
    ({"threads_per_worker": 0}, ValueError, "threads_per_worker"),
    ({"env": ["A=1"]}, ValueError, r"env=.*: it must be a dict"),
    ({"env": {"A=": 1}}, ValueError, "'A=' is not the name"),
    ({"env": {"A": None}}, ValueError, "a string or a number"),
    ({"env": {"OMP_NUM_THREADS": "many"}}, ValueError, "a number of threads"),
    ({"env": {"LD_PRELOAD": "x"}}, ValueError, "cannot be given LD_PRELOAD: it is read before"),
    ({"address": 5}, SessionError, "address=5: it must be a string"),
    ({"token": "x"}, SessionError, r"token= is for a gateway, and the address is not given: give"),
    ({"checkpoint_folder": 5}, ValueError, "checkpoint_folder=5: it must be a path"),
    ({"checkpoint_folder": "~nobody-here/x"}, ValueError, "must be a path on this machine"),
    ({"checkpoint_folder": ""}, ValueError, "checkpoint_folder='': it must be a path"),
    ({"cpus_per_worker": "x"}, ValueError, "cpus_per_worker='x': it must be a finite number"),
    ({"cpus_per_worker": NAN}, ValueError, "cpus_per_worker=nan: it must be a finite number"),
    *(
        ({"gpus_per_worker": wrong}, ValueError, "it must be a fraction below 1, or a whole")
        for wrong in (1.5, -1, "x", NAN, True)
    ),
    ({"start_timeout_s": "x"}, ValueError, "start_timeout_s='x': it must be a number of seconds"),
    ({"start_timeout_s": 0}, ValueError, "start_timeout_s=0: it must be a number of seconds"),
    ({"start_timeout_s": NAN}, ValueError, "start_timeout_s=nan"),
    ({"start_timeout_s": 1e300}, ValueError, "start_timeout_s=1e.300.* at most 1e.09"),
    ({"progress": "yes"}, ValueError, "progress='yes': it must be True, None or False"),
    ({"output": "no"}, ValueError, "output='no': it must be True or False"),
    ({"verbose": 1}, ValueError, "verbose=1: it must be True or False"),
    *(
        ({"buffer_bytes": wrong}, ValueError, f"buffer_bytes={wrong!r}: it must be a whole number")
        for wrong in ("1MB", 0, -1, 1.5, True)
    ),
]


@pytest.mark.parametrize(("options", "kind", "said"), OPTIONS)
def test_options_of_a_session(
    cluster: str, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    before = {gang.name for gang in AlchemistSession.list()}
    with pytest.raises(kind, match=said):
        AlchemistSession(**{"num_workers": 1, **options})
    assert {gang.name for gang in AlchemistSession.list()} == before


def test_every_option_is_documented_and_in_the_signature() -> None:
    names = {option.name for option in fields(GangOptions)}
    assert set(inspect.signature(AlchemistSession).parameters) == names
    assert next(iter(inspect.signature(AlchemistSession).parameters)) == "num_workers"
    assert not [name for name in names if f"\n    {name} : " not in str(AlchemistSession.__doc__)]
    attached = set(inspect.signature(AlchemistSession.attach).parameters)
    assert attached == {option.name for option in fields(AttachOptions)}


def f(comm: Any) -> int:
    return int(comm.size)


CALLS: dict[str, Wrong] = {
    "attach to 5": (lambda _: AlchemistSession.attach(5), SessionError, "name=5: .*is a string"),
    "attach, timeout": (
        lambda _: AlchemistSession.attach("x", timeout=1),
        TypeError,
        r"AlchemistSession.attach has no option 'timeout' .*'timeout_s'\?",
    ),
    "attach, timeout_s": (
        lambda _: AlchemistSession.attach("x", timeout_s="a"), ValueError, "timeout_s='a': it must"
    ),
    "stop None": (lambda _: AlchemistSession.stop_gang(None), SessionError, "name=None: .*string"),
    "list": (lambda _: AlchemistSession.list(address=5), SessionError, "address=5"),
    "request": (
        lambda als: als.request_workers(n=2), TypeError, r"AlchemistSession\.request_workers\(\)"
    ),
    "request None": (
        lambda als: als.request_workers(None), ResourceError, "num_workers=None: it must be"
    ),
    "port": (
        lambda als: als.connect_to_alchemist("127.0.0.1", "x"),
        SessionError,
        "port='x': .*from 1 to 65535",
    ),
    "layout ROWS": (lambda als: als.send_matrix(A, layout="ROWS"), LayoutError, "VC_STAR"),
    "to layout": (lambda als: als.matrix("A").to_layout("ROWS"), LayoutError, "ROWS"),
    "dtype": (lambda als: als.send_matrix(A, dtype="float77"), DtypeError, "not a dtype"),
    "complex": (lambda als: als.send_matrix(A * 1j, dtype="float64"), DtypeError, "without loss"),
    "a handle": (lambda als: als.send_matrix(als.matrix("A")), MatrixError, "on the ranks already"),
    "layout None": (lambda als: als.send_matrix(A, layout=None), LayoutError, "layout=None"),
    "layout list": (lambda als: als.send_matrix(A, layout=[]), LayoutError, r"layout=\[\]"),
    "name 5": (lambda als: als.send_matrix(A, name=5), MatrixError, "name=5: .*string"),
    "name ''": (lambda als: als.send_matrix(A, name=""), MatrixError, "name='': .*string"),
    "name, 2 lines": (lambda als: als.send_matrix(A, name="x\ny"), MatrixError, "printable"),
    "shape of dense": (
        lambda als: als.send_matrix(A, shape=(3, 4)), BadArgumentError, "shape= is for a sparse"
    ),
    "shape of sparse": (
        lambda als: als.send_matrix(sparse.eye_array(3).tocsr(), shape=(1, 1)),
        ShapeError,
        r"shape=\(1, 1\), but the matrix has shape \(3, 3\)",
    ),
    "name of sparse": (
        lambda als: als.send_matrix(sparse.eye_array(3).tocsr(), name=5), MatrixError, "name=5"
    ),
    "fetch an array": (lambda als: als.fetch_matrix(A), MatrixError, "as send_matrix returns it"),
    "row 40": (lambda als: als.matrix("A").fetch(rows=40), ShapeError, "outside"),
    "cols a": (lambda als: als.matrix("A").fetch(cols="a"), ShapeError, "slice"),
    "rows True": (lambda als: als.matrix("A").fetch(rows=True), ShapeError, "rows must .* True"),
    "rows a:b": (
        lambda als: als.matrix("A").fetch(rows=slice("a", "b")), ShapeError, "slice of integers"
    ),
    "fetch, row": (lambda als: als.matrix("A").fetch(row=1), TypeError, r"^Handle\.fetch\(\)"),
    "library": (lambda als: als.load_library("x", 5), BadArgumentError, "path=5: it must be a"),
    "library ''": (lambda als: als.load_library("x", ""), BadArgumentError, "path='': it must"),
    "limit NaN": (lambda als: als.run(f, timeout_s=NAN), BadArgumentError, "timeout_s=nan"),
    "routine, NaN": (
        lambda als: als.load_library("echo").who.options(timeout_s=NAN)(),
        BadArgumentError,
        "timeout_s=nan: it must be a number of seconds",
    ),
    "run a str": (lambda als: als.run("f"), BadArgumentError, "a str cannot be called"),
    "run an array": (lambda als: als.run(A), BadArgumentError, "a ndarray cannot be called"),
    "limit 0": (lambda als: als.run(f, timeout_s=0), BadArgumentError, "timeout_s"),
    "limit of stuck ranks": (
        lambda als: als.run(f, stuck_timeout_s=1e6), BadArgumentError, "stuck_timeout_s",
    ),
    **{
        f"resize {wrong}": (lambda als, wrong=wrong: als.resize(wrong), ResourceError, "num_worker")
        for wrong in (0, -1, 1.5, "3", True, None)
    },
    "no script": (lambda als: als.run_script("/no.py"), BadArgumentError, "cannot read .*/no.py"),
    "a flag": (lambda als: als.run_script(__file__, "--flag"), BadArgumentError, "one string"),
    "folder": (lambda als: als.run_script(__file__, cwd="/no"), RoutineError, "cannot work in"),
    "script None": (lambda als: als.run_script(None), BadArgumentError, "path=None: it must be"),
    "argv 5": (lambda als: als.run_program(5), BadArgumentError, "argv=5: it must be a list"),
    "argv None": (lambda als: als.run_program(["a", None]), BadArgumentError, "none of them None"),
    "cwd 5": (lambda als: als.run_program(["true"], cwd=5), BadArgumentError, "cwd=5"),
    "env": (lambda als: als.run_program(["true"], env="x"), BadArgumentError, "env='x': .*a dict"),
    "stdin": (lambda als: als.run_program(["true"], stdin=[]), BadArgumentError, r"stdin=\[\]"),
    "matrices": (
        lambda als: als.run_program(["true"], matrices=[1]), BadArgumentError, r"matrices=\[1\]"
    ),
    "trace": (lambda als: als.trace(None), BadArgumentError, "path=None: it must be a path"),
    "gateway port": (lambda als: als.serve(port=-1), SessionError, "port=-1.* from 0 to 65535"),
    "gateway host": (lambda als: als.serve(host=5), SessionError, "address=5"),
    "gateway files": (lambda als: als.serve(tokens=5), BadArgumentError, "tokens=5"),
    "columns to save": (
        lambda als: als.matrix("A").save("/tmp/x.csv", columns=5), BadArgumentError, "columns=5"
    ),
    "columns of rows": (
        lambda als: als.matrix("A").to_dataset(5), ShapeError, "columns=5: it must be a list"
    ),
    "blocks": (
        lambda als: als.matrix("A").to_dataset(override_num_blocks=-1),
        ValueError,
        "override_num_blocks=-1",
    ),
    "chunks": (lambda als: als.matrix("A").to_dask((0, 0)), ShapeError, "chunks="),
    "reshape": (lambda als: als.matrix("A").reshape("x"), ShapeError, "shape 'x'"),
    "arange": (lambda als: als.xp.arange(NAN), ShapeError, "they must be finite"),
    "linspace": (lambda als: als.xp.linspace(0, 1, "x"), ShapeError, "num='x'"),
    "placement group": (lambda _: within(None, [], 1.0), ValueError, "group=None"),
    "mpi_function of 5": (lambda _: mpi_function(5, num_workers=1), BadArgumentError, "not a int"),
    "mpi_function, workers": (
        lambda _: mpi_function(f, workers=1), TypeError, "mpi_function has no option 'workers'"
    ),
    "mpi_function, idle": (
        lambda _: mpi_function(f, num_workers=1, idle_s=NAN), ValueError, "idle_s=nan: it must"
    ),
    "mpi_function, start": (
        lambda _: mpi_function(f, num_workers=1, start_timeout_s="x"),
        ValueError,
        "start_timeout_s='x'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_argument_of_a_call(als: AlchemistSession, case: str) -> None:
    call, kind, said = CALLS[case]
    als.send_matrix(A, name="A")
    before = [worker.pid for worker in als.list_workers()]
    with pytest.raises(kind, match=said):
        call(als)
    assert [handle.name for handle in als.list_matrices()] == ["A"]
    assert [worker.pid for worker in als.list_workers()] == before


@pytest.mark.parametrize("columns", [1.5, NAN, [1.5], {"a": 1}])
def test_columns_of_a_file(als: AlchemistSession, tmp_path: Path, columns: Any) -> None:
    np.save(tmp_path / "a.npy", A)
    with pytest.raises(BadArgumentError, match="columns"):
        als.load_matrix(tmp_path / "a.npy", columns=columns)
    with pytest.raises(MatrixError, match="name=''"):
        als.load_matrix(tmp_path / "a.npy", name="")
    assert als.list_matrices() == []


def test_numbers_of_numpy_are_numbers(als: AlchemistSession) -> None:
    assert als.run(f, timeout_s=np.float32(20)) == 3
    assert als.load_library("echo").who.options(timeout_s=np.int64(20))() == [0, 1, 2]


def test_the_file_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(BadArgumentError, match="must be a path on this machine"):
        as_path("~nobody-here/x.npy")
