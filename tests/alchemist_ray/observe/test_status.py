"""``alchemist status``, ``stop`` and ``cancel``, and `alchemist_ray.status`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import alchemist_ray
from alchemist_ray import AlchemistSession, cli
from alchemist_ray.attached.info import CallInfo, GangInfo
from alchemist_ray.errors import CancelledError, SessionError
from alchemist_ray.observe import status
from tests.faults.conftest import Call
from tests.support import traces


class Clock:
    """The module `time` of one module only: other threads sleep as they should."""

    time = staticmethod(time.time)

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.sleep = sleep


@pytest.fixture
def seen(cluster: str) -> Iterator[AlchemistSession]:
    with AlchemistSession(2, name="seen") as session:
        session.send_matrix(np.ones((100, 10)), name="A")
        yield session


def test_a_gang_is_a_line(seen: AlchemistSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == list(status.COLUMNS)
    (row,) = [row for row in rows if row.startswith("seen ")]
    assert row.split()[1:5] == ["ready", "(private)", "2", os.uname().nodename]
    assert "8.0 kB" in row
    assert f"(pid {os.getpid()})" in row


def test_the_same_as_json_and_from_python(
    seen: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--json"]) == 0
    (entry,) = [e for e in json.loads(capsys.readouterr().out) if e["name"] == "seen"]
    (info,) = [gang for gang in alchemist_ray.status() if gang.name == "seen"]
    assert entry["workers"] == info.workers == 2
    assert entry["nbytes"] == info.nbytes == 8000
    assert info.free_nbytes is not None
    assert info.free_nbytes > 1 << 20
    assert entry["libraries"] == list(info.libraries)


def test_watching_repeats(seen: AlchemistSession, capsys: pytest.CaptureFixture[str]) -> None:
    def stop_later(until: list[float], seconds: float) -> None:
        until.append(seconds)
        if len(until) == 3:
            raise KeyboardInterrupt

    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(status, "time", Clock(lambda seconds: stop_later(slept, seconds)))
        assert cli.main(["status", "--watch", "0.5"]) == 0
    assert slept == [0.5] * 3
    assert capsys.readouterr().out.count("seen ") == 3


def test_a_call_is_shown_and_cancelled(
    seen: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    call = Call(lambda: seen.run(lambda comm: time.sleep(60)))
    assert traces.wait_until(lambda: bool(seen.list_calls()), 20) is not None
    assert cli.main(["status"]) == 0
    assert "<lambda>" in capsys.readouterr().out
    assert cli.main(["cancel", "seen"]) == 0
    assert type(call.outcome(0.0, 10).error) is CancelledError
    assert seen.run(lambda comm: comm.size) == 2


def test_a_gang_is_stopped(seen: AlchemistSession) -> None:
    assert cli.main(["stop", "seen"]) == 0
    with pytest.raises(SessionError, match="was stopped"):
        seen.list_matrices()
    assert "seen" not in {gang.name for gang in alchemist_ray.status()}


@pytest.mark.parametrize("command", ["stop", "cancel"])
def test_an_unknown_gang_is_an_error(
    cluster: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "nobody"]) == 1
    assert "no gang 'nobody'" in capsys.readouterr().err


def test_rows_of_any_gang_can_be_shown() -> None:
    calls = (CallInfo("linalg.svd", "running", "", 200.0), CallInfo("f", "queued", "", 1.0))
    busy: dict[str, Any] = {"calls": calls, "detached": True, "last_used": time.time() - 3 * 3600}
    text = status.table([GangInfo("a", "not answering"), GangInfo("b", "ready", **busy)])
    some = GangInfo("c", "ready", workers=6, gpus_per_worker=0.5)
    assert "6 (3 GPUs)" in status.table([some])
    assert "linalg.svd 3 min (+1)" in text
    assert "3 h ago" in text
    assert "not answering" in text
    assert status.table([]) == "no gangs\n"


def test_an_owner_whose_process_is_not_attached_is_told() -> None:
    owned: dict[str, Any] = {"detached": True, "owner": "anna@n1 (pid 7)"}
    there = GangInfo("a", "ready", **owned, processes=("ben@n2 (pid 7)", "anna@n1 (pid 7)"))
    gone = GangInfo("b", "ready", **owned, processes=("ben@n2 (pid 7)",))
    lines = status.table([there, gone]).splitlines()
    assert lines[1].endswith("  anna@n1 (pid 7)")
    assert lines[2].endswith("  anna@n1 (pid 7), not attached")
