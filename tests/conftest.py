"""Shared by all tests: a small Ray cluster, sessions on it, and the check for leftovers.

- ``cluster``: a Ray cluster of 8 CPUs, started by the first test that asks for it.
- ``session``: an open session with 2 workers on it; with
  ``@pytest.mark.parametrize("session", [4], indirect=True)`` it has 4.
- `nothing_left` fails the run if it leaves a process, a folder or shared memory behind.

With pytest-xdist (``make test``) each worker has all of these for itself.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import mpi4py
import pytest
from hypothesis import settings

from tests.support import again, costs, launches, suite, traces, warm_workers

if TYPE_CHECKING:
    from alchemist_ray import AlchemistSession

CLEANUP_LIMIT_S = 10.0  # how long processes and files may take to disappear at the end

gc.disable()  # until all tests are collected: a fifth of the time that it takes
settings.register_profile("tests", deadline=None)  # Hypothesis has 0.2 s for each example
settings.load_profile("tests")
mpi4py.rc.initialize = False  # MPI belongs to the ranks that tests start, not to this process

# The temporary folder of the process that started the workers; None without pytest-xdist.
_common_folder = os.environ["TMPDIR"] if "PYTEST_XDIST_WORKER" in os.environ else None

# Before anything imports Ray. The folder's name is short: Unix sockets are created in it.
tempfile.tempdir = tempfile.mkdtemp(prefix="at-", dir="/tmp")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a thousand processes would compile SciPy
os.environ.update(
    {traces.RUN: uuid.uuid4().hex},
    TMPDIR=tempfile.tempdir,
    RAY_TMPDIR=tempfile.tempdir,  # programs without a cluster do not join one of another test
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_worker_niceness="0",  # as in the Ray that sessions start; at Ray's own 15, load starves it
    REPORTER_UPDATE_INTERVAL_MS="60000",  # what each process uses, for a dashboard
    RAY_prestart_worker_first_driver="0",  # a worker for each CPU: 2 s of CPU for each cluster
    # No test lives long enough to repay the optimizing compiler or parallel garbage collection.
    JDK_JAVA_OPTIONS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> suite.UnitScheduling:
    """Distribute the tests by unit, whatever ``--dist`` says."""
    return suite.UnitScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest units first where several workers share the tests.

    The workers must collect the same names: an address in one is an error, also without workers.
    """
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"give these cases ids without addresses: {unstable}")
    if _common_folder:
        items.sort(key=lambda item: suite.position(item.nodeid))


def pytest_collection_finish() -> None:
    """Leave what has been collected out of all further collections of garbage."""
    gc.freeze()
    gc.enable()


_files = costs.Files()
_left_gangs: dict[str, str] = {}  # and the file that has left them in the Ray that files share
_last = ""  # the test that ran before
_costs: dict[str, tuple[float, float]] = {}  # of all processes of pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Count costs for the test's file; after each unit, look for gangs that its files have left."""
    global _last
    _files.enter(item.nodeid)
    if _last and suite.unit(_last) != suite.unit(item.nodeid):
        traces.wait_until(lambda: traces.gangs() <= _left_gangs.keys(), CLEANUP_LIMIT_S, 0.1)
        for gang in _left_gangs.keys() ^ traces.gangs():
            if _left_gangs.pop(gang, None) is None:  # else it has ended late
                _left_gangs[gang] = _last.partition("::")[0]
    _last = item.nodeid


def pytest_runtest_setup() -> None:
    """Restore the handler of SIGINT: tests of Ctrl-C send the signal to this process.

    A shell ignores it in background jobs; PySpark and Tune leave handlers behind.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell what this process's files have cost; a second try cannot mend a run as a whole."""
    if again.cannot_be_mended(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    found = _files.close()
    if _common_folder is None and session.config.getoption("numprocesses", None):
        return  # the group of this process has those of the workers, which count themselves
    costs.add(_costs, found)
    if _common_folder:
        session.config.workeroutput["costs"] = found  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    costs.add(_costs, getattr(node, "workeroutput", {}).get("costs", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the times of the fault tests, skipped tests, flaky tests, and what files cost."""
    suite.faults(terminalreporter)
    suite.skipped(terminalreporter)
    again.summary(terminalreporter)
    if not terminalreporter.config.option.collectonly:
        costs.summary(terminalreporter, _costs)


def pytest_unconfigure() -> None:
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """After the last test, nothing that this run started may exist any more."""
    before = traces.everything()
    yield
    launches.close()
    if _left_gangs:
        pytest.fail(f"{again.LEFT} gangs, of files: {_left_gangs}", pytrace=False)
    left: dict[str, str] = {}

    def clean() -> bool:
        left.clear()
        left.update(
            (name, line) for name, line in traces.everything().items() if name not in before
        )
        return not left

    if traces.wait_until(clean, CLEANUP_LIMIT_S, 0.1) is None:
        lines = "\n".join(f"  {name} {line}" for name, line in left.items())
        pytest.fail(f"{again.LEFT}\n{lines}", pytrace=False)


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A Ray cluster with 8 CPUs on this machine, joined by this process; its address."""
    import ray  # noqa: PLC0415 - most tests need no Ray

    def start() -> None:
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=500 << 20,
            _temp_dir=f"{tempfile.gettempdir()}/ray",
        )

    with warm_workers.warm_workers():
        try:
            start()
        except Exception as error:
            # Ray gives a node 30 s, whatever else the machine does, and raises an `Exception`.
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            start()
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture
def by_agents(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat objects on this node as remote: its agent locates and sends them."""
    from alchemist_ray.transfer import object_store  # noqa: PLC0415

    found = object_store.locate_objects

    def elsewhere(refs: Any) -> list[object_store.ObjectLocation]:
        return [held._replace(here=False) for held in found(refs)]

    monkeypatch.setattr(object_store, "locate_objects", elsewhere)


@pytest.fixture(params=["this process", "agents"])
def senders(request: pytest.FixtureRequest) -> None:
    """Objects are sent by this process, and by agents."""
    if request.param == "agents":
        request.getfixturevalue("by_agents")


@pytest.fixture
def session(cluster: str, request: pytest.FixtureRequest) -> Iterator[AlchemistSession]:
    """An open session with 2 workers (or as many as an indirect parameter says)."""
    from alchemist_ray import AlchemistSession  # noqa: PLC0415

    with AlchemistSession(getattr(request, "param", 2)) as opened:
        traces.note_segments()
        yield opened
