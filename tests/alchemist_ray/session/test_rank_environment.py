"""`env=`: variables of the ranks, for every way to start a gang; and what ranks have anyway."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import alchemist_ray
from alchemist_ray import AlchemistSession, Executor
from alchemist_ray.arguments import REFUSED_VARIABLES, checked_env
from alchemist_ray.cluster import ray_cluster
from alchemist_ray.observe.status import table
from envs import HPCSimulatorEnv
from envs.errors import EnvConfigError
from mpi_workers.node.processes import SLACK_NS
from tests.support import commands
from tests.support.traces import wait_until

GIVEN = {"SEEN": "by import", "COUNT": "3"}


def read(comm: Any, *names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_a_module_reads_them_at_its_import(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reads_at_import.py").write_text("import os\nSEEN = os.environ.get('SEEN')\n")

    def imported(comm: Any, folder: str) -> list[str | None]:
        sys.path.insert(0, folder)
        import reads_at_import  # type: ignore[import-not-found]  # noqa: PLC0415

        return comm.allgather(reads_at_import.SEEN)

    with AlchemistSession(2, env=GIVEN) as als:
        assert als.run(imported, str(tmp_path)) == ["by import"] * 2
        assert als.run(read, "COUNT") == ["3"]
        als.run_program(["printenv", "SEEN"])
    assert capsys.readouterr().out.count("by import\n") == 2


def test_request_workers_adds_some_for_its_gang(cluster: str) -> None:
    with AlchemistSession(env=GIVEN) as als:
        als.request_workers(1, env={"COUNT": 4})
        assert als.run(read, *GIVEN) == ["by import", "4"]
        als.yield_workers()
        als.request_workers(1)
        assert als.run(read, *GIVEN) == ["by import", "3"]


@pytest.mark.parametrize("launcher", ["pmi", "mpiexec"])
def test_ranks_that_are_started_again_have_them(cluster: str, launcher: str) -> None:
    with AlchemistSession(2, env=GIVEN, max_failures=1, launcher=launcher) as als:
        first = als.list_workers()
        os.kill(first[1].pid, signal.SIGKILL)
        assert wait_until(lambda: als.list_workers() != first, 60) is not None
        assert als.run(read, *GIVEN) == ["by import", "3"]
        als.resize(1)
        assert als.run(read, *GIVEN) == ["by import", "3"]


def test_functions_and_executors_take_them_and_share_gangs_only_with_equal_ones(
    cluster: str,
) -> None:
    function = alchemist_ray.mpi_function(read, num_workers=1, env=GIVEN, idle_s=0)
    other = function.options(env={"SEEN": "other"})
    assert ray.get([each.remote("SEEN") for each in (function, other)]) == [
        ["by import"],
        ["other"],
    ]
    with Executor(num_workers=1, max_gangs=1, env=GIVEN) as executor:
        one_call = {"env": {"SEEN": "one call"}}
        futures = [executor.submit(read, "SEEN", resources=each) for each in (None, one_call)]
        assert [future.result(60) for future in futures] == [["by import"], ["one call"]]


SIMULATOR = """
import json, os
from ali import Context, routine

@routine("spec")
def spec(ctx: Context) -> str:
    box = {"observation": {"shape": [1]}, "action": {"shape": [1], "low": -1, "high": 1}}
    return json.dumps(box | {"episode_length": 5})

@routine()
def reset(ctx: Context) -> None: ...

@routine()
def step(ctx: Context, action: list[float]) -> None: ...

@routine("state")
def get_state(ctx: Context) -> list[float]:
    return [float(os.environ["COUNT"])]

@routine("score")
def get_score(ctx: Context) -> list[float]:
    return [0.0]
"""


def test_simulators_of_environments_have_them(cluster: str, tmp_path: Path) -> None:
    path = tmp_path / "reads_count.py"
    path.write_text(SIMULATOR)
    config = {"lib_name": "reads_count", "lib_path": path, "num_workers": 1}
    with HPCSimulatorEnv({**config, "env": GIVEN}) as env:
        assert env.reset(seed=1)[0] == np.float32(3)
    with pytest.raises(EnvConfigError, match="env: ranks cannot be given PATH"):
        HPCSimulatorEnv({**config, "env": {"PATH": "/x"}})


def test_the_catalogue_shows_their_names_to_those_who_attach(cluster: str) -> None:
    with AlchemistSession(1, name="given", env=GIVEN):
        (listed,) = [gang for gang in AlchemistSession.list() if gang.name == "given"]
        assert listed.env == ("COUNT", "SEEN")
        assert "COUNT,SEEN" in table([listed])
        assert "by import" not in repr(listed)
        with AlchemistSession.attach("given") as attached:
            assert attached.run(read, *GIVEN) == ["by import", "3"]


def test_names_that_would_break_a_rank_are_refused_with_the_way_that_exists() -> None:
    names = (
        "PMI_RANK", "PMIX_RANK", "HYDI_X", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH",
        "ALCHEMIST_LAUNCHER", "MPI4PY_RC_INITIALIZE", "SLURM_PROCID",
    )  # fmt: skip
    for name in names:
        (why,) = [why for prefix, why in REFUSED_VARIABLES.items() if name.startswith(prefix)]
        with pytest.raises(ValueError, match=f"ranks cannot be given {name}") as caught:
            AlchemistSession(1, env={name: "x"})
        assert why in str(caught.value)
    assert checked_env({"PATHOLOGY": 1, "UCX_TLS": "self,sm"}) == {
        "PATHOLOGY": "1",
        "UCX_TLS": "self,sm",
    }


def threads(comm: Any) -> tuple[set[int], list[str | None]]:
    from threadpoolctl import threadpool_info  # noqa: PLC0415

    pools = {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}
    return pools, read(comm, "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def test_threads_of_blas_follow_them(cluster: str) -> None:
    with AlchemistSession(1, env={"OMP_NUM_THREADS": 2}) as als:
        assert als.run(threads) == ({2}, ["2", "2", "2"])
        als.yield_workers()
        als.request_workers(1, env={"OPENBLAS_NUM_THREADS": 1})
        assert als.run(threads) == ({1}, ["2", "1", "2"])


def test_threads_of_the_program_that_ranks_do_not_get_are_told_once(
    cluster: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray_cluster._warn_of_threads.cache_clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for _ in range(2):
        with AlchemistSession(1) as als:
            assert als.run(threads)[1][0] == "1"
    told = [record.getMessage() for record in caplog.records if "OMP_NUM" in record.getMessage()]
    assert len(told) == 1
    assert "threads_per_worker=2 sets it" in told[0]
    ray_cluster._warn_of_threads.cache_clear()
    caplog.clear()
    with AlchemistSession(1, threads_per_worker=2), AlchemistSession(1, env={"OMP_NUM_THREADS": 3}):
        assert "OMP_NUM" not in caplog.text


def test_sleeps_are_exact_only_where_ranks_have_cores_of_their_own(cluster: str) -> None:
    """Elsewhere MPICH yields by a sleep of 1 ns: an exact one would leave no core to others."""

    def slack_ns(comm: Any) -> int:
        return int(Path("/proc/self/timerslack_ns").read_text())

    shared = {"threads_per_worker": len(os.sched_getaffinity(0)) + 1, "cpus_per_worker": 1}
    with AlchemistSession(1) as alone, AlchemistSession(1, **shared) as crowded:
        assert alone.run(slack_ns) == SLACK_NS
        assert crowded.run(slack_ns) > SLACK_NS


@pytest.mark.skipif(
    not Path(sysconfig.get_path("scripts"), "mpicc").exists(), reason="MPI is not that of a wheel"
)
def test_ranks_find_their_own_mpi_without_an_activated_environment(tmp_path: Path) -> None:
    """A Ray whose PATH has the mpicc of another MPI first, as Debian's with Open MPI."""
    wrong = tmp_path / "mpicc"
    wrong.write_text("#!/bin/sh\nexit 1\n")
    wrong.chmod(0o755)
    program = """
        import os, shutil
        from alchemist_ray import AlchemistSession

        def found(comm):
            return shutil.which("mpicc"), os.environ["MPI_LIB_NRN_PATH"]

        with AlchemistSession(1) as als:
            print(*als.run(found))
            als.run_program(["sh", "-c", "command -v mpicc"])
    """
    path = os.pathsep.join([str(tmp_path), "/usr/bin", "/bin"])
    done = commands.python(program, PATH=path, RAY_ADDRESS="local")
    assert done.returncode == 0, done.stderr
    mpicc, library, *_, by_program = done.stdout.split()
    assert mpicc == by_program == shutil.which("mpicc", path=sysconfig.get_path("scripts"))
    assert Path(library).name.startswith("libmpi.so")
    assert Path(library).exists()


def test_packages_that_are_imported_before_them_are_in_the_docs(cluster: str) -> None:
    def imported(comm: Any) -> list[str]:
        known = {*sys.stdlib_module_names, "ali", "cython_runtime", "mpi_workers"}
        return sorted({name.partition(".")[0] for name in sys.modules} - known)

    page = (commands.ROOT / "docs/your-code.md").read_text()
    listed = page.partition("- Imported earlier")[2].partition("Set such a variable")[0]
    with AlchemistSession(1) as als:
        found = als.run(imported)
    by_others = {"charset_normalizer"}  # only where it is installed
    assert [name for name in found if name[0] != "_" and name not in by_others] == re.findall(
        r"`(\w+)`", listed
    )
