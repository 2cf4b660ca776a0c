"""Submitted calls through a gateway: killed thin clients, the rights of other users, quotas."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AuthError, ResourceError, SessionError
from alchemist_ray.gateway.server.access import TokenFile
from alchemist_ray.gateway.server.actor import GatewayInfo
from ali import context
from tests.alchemist_ray.gateway.conftest import blocking, thin_environment

LIMIT_S = 60.0
CALLS = 5


@pytest.fixture
def night(there: dict[str, Any]) -> Iterator[None]:
    """A detached gang of anna's, to which this process is not attached."""
    AlchemistSession(2, name="night", lifetime="detached", **there).detach()
    yield
    with contextlib.suppress(SessionError):
        AlchemistSession.stop_gang("night", **there)


def test_a_killed_thin_client_loses_no_call(
    night: None, there: dict[str, Any], tmp_path: Path
) -> None:
    text = f"""
        from alchemist_ray import AlchemistSession
        import time
        def shot(comm, i):
            import time
            print("shot", i, flush=True)
            time.sleep(0.1)
            return i, comm.size
        als = AlchemistSession.attach("night")
        for i in range({CALLS}):
            als.submit(shot, i, label=str(i))
        print("submitted", flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", blocking() + textwrap.dedent(text)],
        env=thin_environment(there), cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stdout.readline() == "submitted\n"
        program.kill()
    with AlchemistSession.attach("night", **there) as als:
        futures = als.futures()
        assert [future.result(LIMIT_S) for future in futures] == [(i, 2) for i in range(CALLS)]
        assert "[rank 1] shot 3\n" in futures[3].output
        assert "as anna" in futures[0].info.caller


def test_another_user_sees_no_call_and_changes_none(
    night: None, there: dict[str, Any], gateway: GatewayInfo, tokens: TokenFile
) -> None:
    with AlchemistSession.attach("night", **there) as als:
        futures = [als.submit(lambda comm: "secret", label="plan") for _ in range(2)]
        assert [future.result(LIMIT_S) for future in futures] == ["secret"] * 2
    token = tokens.create("ben", ("call", "run_code"))
    with AlchemistSession.attach("night", address=gateway.address, token=token) as als:
        for op, fields in {
            "submit": {"command": {"op": "run", "task": {}, "uses": []}, "keep_s": 1.0},
            "submitted": {}, "call_state": {}, "call_result": {}, "cancel_call": {},
            "forget_call": {},
        }.items():  # fmt: skip
            with pytest.raises(AuthError, match="started by another user"):
                als.connection.request({"op": op, "call": futures[0].id, **fields})
        with pytest.raises(AuthError):
            als.futures()
    listed = AlchemistSession.list(address=gateway.address, token=token)
    (seen,) = (gang for gang in listed if gang.name == "night")
    assert (seen.calls, seen.ended_calls) == ((), {})
    (own,) = (gang for gang in AlchemistSession.list(**there) if gang.name == "night")
    assert sum(sum(states.values()) for states in own.ended_calls.values()) == 2
    with AlchemistSession.attach("night", **there) as als:
        assert [future.result(LIMIT_S) for future in als.futures()] == ["secret"] * 2


def test_scopes_and_quotas_hold_for_submitted_calls(
    gateway: GatewayInfo, tokens: TokenFile
) -> None:
    only_calls = tokens.create("cleo", ("call",))
    there = {"address": gateway.address, "token": only_calls}
    with AlchemistSession(1, name="routines", lifetime="detached", **there) as als:
        with pytest.raises(AuthError, match="run_code"):
            als.submit(lambda comm: 1)
        norm = als.load_library("linalg").norm
        assert als.submit(norm, als.send_matrix(np.eye(4))).result(LIMIT_S) == 2.0
        command = {"op": "call", "library": "files", "routine": "load", "arguments": {}}
        with pytest.raises(AuthError, match="files"):
            als.connection.request({"op": "submit", "call": "1", "command": command, "keep_s": 1})
        AlchemistSession.stop_gang("routines", **there)
    there["token"] = tokens.create("dora", ("call", "run_code"), nbytes=1_000_000)
    with AlchemistSession(1, name="small", lifetime="detached", **there) as als:
        future = als.submit(lambda comm: context().zeros((200_000,), float))
        with pytest.raises(ResourceError, match="the quota of this gang's user leaves"):
            future.result(LIMIT_S)
        AlchemistSession.stop_gang("small", **there)
