"""Notebooks at a computing centre, with the real parts, as `docs/computing-centre.md` has it.

The tests follow each other on one centre: anna's gang is in a job of its own.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.jupyterhub.centre import Centre
from tests.support import traces
from tests.support.commands import ALCHEMIST

GANG_S = 200.0  # for a job, its Ray and its gang to start on a machine that others use too
RESULT_S = 10.0  # from a notebook that is open to the first result
QUEUED = 20
ATTACH = """
import time
begun = time.monotonic()
from alchemist_ray import AlchemistSession
als = AlchemistSession.attach("shots")
size = als.run(lambda comm: comm.size)
print(size, time.monotonic() - begun)
"""
SHOTS = """
def shot(comm, number, go=None):
    import os, time
    print("shot", number, flush=True)
    while go and not os.path.exists(go):
        time.sleep(0.02)
    return number * comm.size
"""


class Notebook:
    """A user's notebook."""

    def __init__(self, centre: Centre, user: str) -> None:
        self._centre = centre
        self._user = user
        assert centre.browser("log_in", user) == 201
        self.started_s = centre.browser("start_server", user)
        self.open()

    def open(self) -> None:
        """Open it, with a kernel of its own."""
        self._centre.browser("start_kernel", self._user)

    def run(self, cell: str, limit_s: float = 300.0) -> str:
        said: str = self._centre.browser("run", self._user, cell, limit_s=limit_s)
        return said

    def value(self, cell: str) -> Any:
        """What a cell prints as JSON."""
        said = self.run(f"import json\n{cell}")
        try:
            return json.loads(said.splitlines()[-1])
        except (IndexError, ValueError):
            pytest.fail(f"{cell}\n{said}", pytrace=False)


class GangJob:
    """A job with anna's gang, submitted from the login host."""

    def __init__(self, centre: Centre) -> None:
        words = [*ALCHEMIST, "slurm", "submit", "-N", 1, "-c", 2, "-t", 30, "-J", "shots"]
        told = centre.as_user("anna", *words, "--", "python", "-m", "cray.gang", "shots", 2)
        self._centre = centre
        self.number, self.log = (
            next(line.split(" ", 1)[1] for line in told.splitlines() if line.startswith(name))
            for name in ("job ", "log ")
        )
        self.file = centre.home("anna") / ".alchemist/gangs/shots.json"
        if traces.wait_until(lambda: "is ready" in self.said, GANG_S, 0.2) is None:
            pytest.fail(f"no gang in job {self.number}:\n{self.said}", pytrace=False)

    @property
    def said(self) -> str:
        path = Path(self.log)
        return path.read_text() if path.exists() else ""

    def signal(self) -> None:
        """Slurm's signal before the time limit; wait until the job is over."""
        self._centre.login("scancel", "--batch", "--signal=TERM", self.number)
        self._centre.wait(self.number, GANG_S)


@pytest.fixture(scope="module")
def job(centre: Centre) -> GangJob:
    return GangJob(centre)


@pytest.fixture(scope="module")
def anna(centre: Centre, job: GangJob) -> Notebook:
    return Notebook(centre, "anna")


@pytest.fixture(scope="module")
def ben(centre: Centre) -> Notebook:
    return Notebook(centre, "ben")


def test_a_notebook_finds_the_gang_of_another_job_by_its_name(
    centre: Centre, job: GangJob, anna: Notebook
) -> None:
    assert job.file.stat().st_mode & 0o777 == 0o600
    assert job.file.stat().st_uid == centre.home("anna").stat().st_uid
    begun = traces.clock()
    size, seconds = anna.run(ATTACH).split()
    took = traces.clock() - begun
    print(
        f"  notebook server {anna.started_s:.1f} s, import to first result {float(seconds):.1f} s"
    )
    assert size == "2"
    assert took < RESULT_S
    matrix = "als.send_matrix(np.arange(6.0).reshape(2, 3), name='A')"
    assert anna.run(f"import numpy as np\nkept = {matrix}") == ""


def test_another_user_does_not_reach_it(centre: Centre, job: GangJob, ben: Notebook) -> None:
    assert "SessionError" in ben.run(ATTACH)
    assert "PermissionError" in ben.run(f"open({str(job.file)!r})")
    address = json.loads(job.file.read_text())["address"]
    guess = f"AlchemistSession.attach('shots', address={address!r}"
    assert "AuthError: a gateway requires a token" in ben.run(f"{guess})")
    token = "a1b2c3d4.0123456789abcdef0123456789abcdef"
    assert "AuthError" in ben.run(f"{guess}, token={token!r})")


def test_a_gang_in_the_allocation_of_the_notebook(centre: Centre, ben: Notebook) -> None:
    said = ben.run("!alchemist slurm start")
    assert "AlchemistSession()" in said, said
    ben.open()  # alchemist_ray is imported when the job has its Ray
    cell = "from alchemist_ray import AlchemistSession\nwith AlchemistSession(2) as own:\n"
    assert ben.value(f"{cell}    print(own.run(lambda comm: comm.allreduce(1)))") == 2
    ben.run("!alchemist slurm stop")


def submit(anna: Notebook, go: Path) -> None:
    """One call that runs, and 20 that wait."""
    cell = f"{SHOTS}\nfutures = [als.submit(shot, n, {str(go)!r} if n == 0 else None)"
    anna.run(f"{cell} for n in range({QUEUED} + 1)]")
    assert traces.wait_until(lambda: anna.value("print(json.dumps(futures[0].running()))"), 60)


def collect(anna: Notebook, go: Path) -> None:
    """All results in a notebook that has been opened again."""
    said = anna.run(ATTACH.replace("size = als.run(lambda comm: comm.size)", "size = 0"))
    assert said.startswith("0 "), said
    states = anna.value("print(json.dumps([f.info.state for f in als.futures()]))")
    assert states[-QUEUED - 1 :] == ["running", *["queued"] * QUEUED]
    go.touch()
    found = anna.value("print(json.dumps([f.result(60) for f in als.futures()]))")
    assert found[-QUEUED - 1 :] == [2 * number for number in range(QUEUED + 1)]
    assert "[rank 1] shot 20" in anna.run("print(als.futures()[-1].output)")
    anna.run("for f in als.futures(): f.forget()")


def go_of(centre: Centre, name: str) -> Path:
    """A file that lets the running call end: anna's home is on all nodes."""
    return centre.home("anna") / f"go-{name}"


def test_a_killed_kernel_finds_all_results(centre: Centre, job: GangJob, anna: Notebook) -> None:
    anna.run("over = als.submit(lambda comm: 'over')\nprint(over.result(60))")
    submit(anna, go := go_of(centre, "kernel"))
    assert anna.run("import os; os.kill(os.getpid(), 9)") == "killed"
    anna.open()
    collect(anna, go)


def test_a_killed_notebook_server_and_hub(centre: Centre, job: GangJob, anna: Notebook) -> None:
    """The gang's calls go on. The hub knows the servers when it is started again."""
    submit(anna, go := go_of(centre, "server"))
    cell = "import os; print(json.dumps([os.getppid(), os.uname().nodename]))"
    pid, name = anna.value(cell)
    next(node for node in centre.nodes if node.name == name).signal(pid)
    centre.kill_hub()
    centre.start_hub()
    again = Notebook(centre, "anna")
    collect(again, go)
    vars(anna).update(vars(again))


def test_a_killed_rank_costs_the_running_call(centre: Centre, job: GangJob, anna: Notebook) -> None:
    submit(anna, go := go_of(centre, "rank"))
    anna.run("pid = als.list_workers()[1].pid")
    pid = anna.value("print(pid)")
    node = centre.nodes_of(job.number)[0]
    node.signal(pid)
    said = anna.run("futures[0].result(60)")
    assert "GroupRecoveredError" in said
    found = anna.value("print(json.dumps([f.result(60) for f in futures[1:]]))")
    assert found == [2 * number for number in range(1, QUEUED + 1)]
    assert anna.run("print(als.matrix('A').fetch().sum())") == "15.0\n"
    assert not go.exists()


def test_matrices_are_saved_before_the_time_limit_and_the_next_job_has_them(
    centre: Centre, job: GangJob, anna: Notebook
) -> None:
    """Slurm's signal, as before the time limit. A call runs and others wait."""
    submit(anna, go_of(centre, "limit"))
    begun = time.monotonic()
    job.signal()
    print(f"  saved and ended {time.monotonic() - begun:.1f} s after the signal")
    assert not job.file.exists()
    assert "SessionError" in anna.run("AlchemistSession.attach('shots')")
    following = GangJob(centre)
    anna.open()
    assert anna.run(ATTACH).startswith("2 ")
    assert (
        anna.run("print(als.matrix('A').fetch().tolist())")
        == "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]\n"
    )
    assert anna.value("print(len(als.futures()))") == 0
    centre.login("scancel", following.number)  # without a signal that it could use
    centre.wait(following.number, GANG_S)
    assert os.listdir(following.file.parent) is not None
