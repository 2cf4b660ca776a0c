"""Metrics: what Ray exports of ours, the page in docs, and the dashboard's queries."""

from __future__ import annotations

import getpass
import importlib.util
import logging
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import ResourceError, RoutineError
from alchemist_ray.measures import events, exporter, metrics
from alchemist_ray.runtime.commands.gang_measures import GangMeasures, held_bytes
from alchemist_ray.runtime.commands.matrix_records import Record
from tests.deploy.kuberay.folders import queries
from tests.support import traces
from tests.support.build import library

PENDULUM = Path(__file__).parents[2] / "envs" / "pendulum.py"
SIMULATOR = "measured_pendulum"  # other tests of this process use the library by its own name
SIMULATES = importlib.util.find_spec("gymnasium") is not None
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
EXPORT_LIMIT_S = 60.0
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped() -> Samples:
    """The exported samples of ours, summed over processes: by name and the labels of ours."""
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for name, labels, value in re.findall(r"^ray_(alchemist_\w+)\{(.*)\} (\S+)$", text, re.M):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        own = metrics.METRICS[base if base in metrics.METRICS else name].labels
        pairs = frozenset(
            (key, said) for key, said in re.findall(r'(\w+)="([^"]*)"', labels) if key in own
        )
        if not name.endswith("_bucket"):
            found[name, pairs] = found.get((name, pairs), 0.0) + float(value)
    return found


def total(samples: Samples, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(
        value for (each, pairs), value in samples.items() if each == name and wanted <= pairs
    )


@pytest.fixture(scope="module")
def exported(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Samples]:
    """What is exported while a gang with a name runs, after some calls of it."""
    folder = tmp_path_factory.mktemp("metrics")
    with AlchemistSession(2, name="measured", max_failures=0) as session:
        A = session.send_matrix(np.ones((1000, 100)), layout="MC_MR")
        lib = session.load_library("linalg")
        for _ in range(3):
            lib.norm(A)
        with pytest.raises(RoutineError):
            lib.cholesky(session.send_matrix(-np.eye(4)))
        with pytest.raises(ResourceError):
            lib.full(10**8, 10**8, 1.0)
        session.load_library("napping", library(folder / "napping.py", NAPPING)).nap(0.25)
        A.fetch()
        if SIMULATES:
            _simulate()
        with AlchemistSession(1, name="losing", max_failures=1) as losing:
            os.kill(losing.list_workers()[0].pid, signal.SIGKILL)
            # The last values, as in Prometheus: Ray drops a gauge that two reports did not set.
            now: Samples = {}

            def there() -> bool:
                now.update(scraped())
                calls = total(now, "alchemist_calls_total", gang="measured", routine="norm")
                held = total(now, "alchemist_held_bytes", gang="measured")
                moved = total(now, "alchemist_transferred_bytes_total", direction="fetch")
                again = total(now, "alchemist_recoveries_total", gang="losing")
                steps = total(now, "alchemist_env_steps_total", simulator=SIMULATOR)
                return (
                    total(now, "alchemist_free_bytes") > 0 and calls >= 3 and held >= 800_000
                    and moved >= 800_000 and again >= 1 and steps >= 3 * SIMULATES
                )  # fmt: skip

            assert traces.wait_until(there, EXPORT_LIMIT_S, 0.5) is not None, now
            yield now


NAPPING = """
import time
@routine()
def nap(ctx: Context, seconds: float) -> None: time.sleep(seconds)
"""


def _simulate() -> None:
    """Three steps of a simulation whose gang is lost and started again."""
    from envs import GangLostError, HPCSimulatorEnv  # noqa: PLC0415 - gymnasium is optional

    with HPCSimulatorEnv({"lib_name": SIMULATOR, "lib_path": str(PENDULUM)}) as env:
        env.reset(seed=1)
        for _ in range(3):
            env.step([0.1])
        os.kill(env._simulation._session.list_workers()[0].pid, signal.SIGKILL)
        with pytest.raises(GangLostError):
            env.step([0.1])
        env.reset()


def test_calls_are_counted_by_routine_and_outcome(exported: Samples) -> None:
    name = "alchemist_calls_total"
    labels = {"gang": "measured", "library": "linalg"}
    assert total(exported, name, **labels, routine="norm", outcome="ok") == 3
    assert total(exported, name, **labels, routine="cholesky", outcome="failed") == 1
    assert total(exported, name, **labels, routine="full", outcome="refused") == 1
    assert total(exported, "alchemist_call_seconds_count", routine="norm") >= 3
    assert total(exported, "alchemist_queue_seconds_count", gang="measured") >= 4
    # The histogram's `_sum` has the middle of its bucket, 0.2 s.
    assert 0.25 <= total(exported, "alchemist_call_time_seconds_total", library="napping") < 0.9


def test_the_state_of_a_gang_is_shown(exported: Samples) -> None:
    user = getpass.getuser()  # without host and process, which would be labels without number
    assert total(exported, "alchemist_gangs", gang="measured", state="ready", user=user) == 1
    assert total(exported, "alchemist_ranks", gang="measured") == 2
    assert total(exported, "alchemist_processes", gang="measured") == 1
    assert total(exported, "alchemist_held_bytes", gang="measured") >= 800_000
    assert total(exported, "alchemist_free_bytes") > 1 << 20
    assert total(exported, "alchemist_starts_total", outcome="ok") >= 1


def test_transfers_are_counted_by_direction_and_route(exported: Samples) -> None:
    name = "alchemist_transferred_bytes_total"
    for direction in ("send", "fetch"):
        assert total(exported, name, direction=direction, route="shared memory") >= 800_000
        seconds = total(exported, "alchemist_transfer_seconds_total", direction=direction)
        assert 0 < seconds < 1000  # of all tests of this process so far


def test_the_seconds_of_transfers_are_those_that_the_caller_waits(
    session: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: dict[str, float] = {"send": 0.0, "fetch": 0.0}
    export = metrics.count

    def count(metric: str, labels: Sequence[str] = (), by: float = 1) -> None:
        if metric == "alchemist_transfer_seconds_total":
            counted[labels[0]] += by
        export(metric, labels, by)

    monkeypatch.setattr(metrics, "count", count)
    A = np.ones((4000, 2000))
    for layout in ("VC_STAR", "MC_MR"):
        begin = time.perf_counter()
        sent = session.send_matrix(A, layout=layout)
        middle = time.perf_counter()
        sent.fetch(slice(0, None, 2), slice(0, None, 3))  # the gaps are cut out here
        waited = {"send": middle - begin, "fetch": time.perf_counter() - middle}
        for direction, seconds in waited.items():
            assert 0.8 * seconds - 0.005 < counted.pop(direction) < seconds
            counted[direction] = 0.0


def test_losses_and_recoveries_are_counted_by_cause(exported: Samples) -> None:
    assert total(exported, "alchemist_failures_total", gang="losing") == 1
    (cause,) = (
        dict(pairs)["cause"]
        for name, pairs in exported
        if name == "alchemist_failures_total" and ("gang", "losing") in pairs
    )
    assert "SIGKILL" in cause
    assert total(exported, "alchemist_recoveries_total", gang="losing", outcome="ok") == 1


@pytest.mark.skipif(not SIMULATES, reason="needs gymnasium: pip install 'alchemist-on-ray[envs]'")
def test_steps_and_restarts_of_simulations_are_counted(exported: Samples) -> None:
    assert total(exported, "alchemist_env_steps_total", simulator=SIMULATOR) >= 3
    assert total(exported, "alchemist_env_gang_restarts_total", simulator=SIMULATOR) == 1
    assert total(exported, "alchemist_env_dropped_steps_total", simulator=SIMULATOR) == 1


def test_a_gang_that_has_ended_shows_nothing(exported: Samples) -> None:
    with AlchemistSession(1, name="short") as session:
        session.send_matrix(np.ones((10, 10)))

    def gone() -> bool:
        return total(scraped(), "alchemist_gangs", gang="short") == 0

    assert traces.wait_until(gone, EXPORT_LIMIT_S, 0.5) is not None


def test_every_query_of_the_dashboard_finds_what_is_exported(exported: Samples) -> None:
    names = {name for name, _ in exported}
    absent = {"gateway"} if SIMULATES else {"gateway", "env"}  # gateway/test_gateway_metrics.py
    for query in queries():
        for name in re.findall(r"ray_(alchemist_\w+)\{", query):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            about = metrics.METRICS[base if base in metrics.METRICS else name]
            by = re.findall(r" by \(([^)]*)\)", query)
            labels = {label.strip() for group in by for label in group.split(",")}
            assert labels - {"le"} <= set(about.labels), query
            if not any(f"alchemist_{word}" in name for word in absent):
                assert name.replace("_bucket", "_count") in names, name


def test_the_page_has_the_table() -> None:
    lines = ["| metric | kind | labels | of |", "|---|---|---|---|"]
    for name, about in metrics.METRICS.items():
        labels = ", ".join(f"`{label}`" for label in about.labels) or "-"
        lines.append(f"| `ray_{name}` | {about.kind} | {labels} | {about.text} |")
    table = "\n".join(lines)
    assert table in PAGE.read_text(), f"paste into docs/metrics.md:\n{table}"


def test_an_event_is_a_line_in_the_log_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    declared = [value for value in vars(events).values() if isinstance(value, events.Event)]
    assert len(declared) >= 8
    for event in (*declared, *events.SIMULATOR_LOSSES.values()):
        assert set(event.metrics) <= set(metrics.METRICS)
    metrics.taken()
    with caplog.at_level("INFO"):
        log = logging.getLogger("gang")
        events.note(events.STARTED, log, outcome="ok", seconds=1.5, ranks="2 on n1")
        events.note(events.CALLED, log, gang="g", library="linalg", routine="svd", outcome="ok",
                    name="linalg.svd", seconds=0.5, queued_s=0.25)  # fmt: skip
    assert caplog.messages == ["gang started in 1.50 s: 2 on n1"]  # calls at level debug
    counts = metrics.taken()
    assert counts.added["alchemist_starts_total", ("ok",)] == 1
    assert counts.times["alchemist_start_seconds", ()] == [1.5]
    assert counts.added["alchemist_calls_total", ("g", "linalg", "svd", "ok")] == 1
    assert counts.times["alchemist_queue_seconds", ("g",)] == [0.25]


def test_labels_that_users_choose_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_seen", set())
    labels = {metrics.bounded(f"routine{i}") for i in range(10 * metrics.MOST_LABELS)}
    assert len(labels) == metrics.MOST_LABELS + 1
    assert metrics.OTHER in labels
    assert metrics.bounded("routine0") == "routine0"


def test_gangs_of_one_process_are_added_up() -> None:
    status = {"processes": [{}], "calls": []}
    first, second = GangMeasures(user="anna"), GangMeasures(user="anna")
    gauge = "alchemist_gangs", (metrics.PRIVATE, "ready", "anna")
    for gang in (first, second, second):
        gang.show("ready", status, None, [])
    assert metrics.taken().gauges[gauge] == 2
    first.hide()
    second.show("ready", status, None, [])
    assert metrics.taken().gauges[gauge] == 1
    second.hide()
    assert metrics.taken().gauges[gauge] == 0


def test_the_start_and_the_end_of_a_gang_are_exported_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    gang = GangMeasures(user="anna")
    monkeypatch.setattr(exporter, "soon", lambda: asked.append(state))
    for state in ("ready", "ready", "recovering", "ended"):
        if state == "ended":
            gang.hide()
        else:
            gang.show(state, {"processes": [], "calls": []}, None, [])
    assert asked == ["ready", "recovering", "ended"]


def test_memory_of_layouts_with_copies_counts_each_copy() -> None:
    def record(layout: str) -> Record:
        return Record(1, "A", (100, 10), "float64", layout, sealed=True, source={})

    hosts = ["a", "a", "b", "b"]
    assert held_bytes(hosts, [record("VC_STAR")]) == {"a": 4000, "b": 4000}
    assert held_bytes(hosts, [record("STAR_STAR")]) == {"a": 16_000, "b": 16_000}
    assert held_bytes(hosts, [record("CIRC_CIRC")]) == {"a": 8000, "b": 0}
    both = [record("VC_STAR"), record("CIRC_CIRC")]
    assert held_bytes(hosts, both) == {"a": 12_000, "b": 4000}
