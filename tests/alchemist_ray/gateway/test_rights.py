"""Scopes, quotas, users, and the command line for tokens."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.cli import main
from alchemist_ray.errors import (
    AuthError,
    CancelledError,
    GroupFailedError,
    ResourceError,
    SessionError,
)
from alchemist_ray.gateway.server import access
from alchemist_ray.gateway.server.access import Token, TokenFile
from alchemist_ray.gateway.server.actor import GatewayInfo
from alchemist_ray.gateway.server.gangs import SessionCommands
from ali import DistMatrix, context
from mpi_workers.data.description import TransferTarget
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution
from mpi_workers.protocol import libraries
from mpi_workers.protocol.commands import COMMANDS
from tests.faults.conftest import Call
from tests.support import traces


def test_a_token_for_calls_runs_no_code_and_touches_no_file(
    gateway: GatewayInfo, tokens: TokenFile, tmp_path: Path
) -> None:
    with AlchemistSession(2, address=gateway.address, token=tokens.create("ben", ("call",))) as als:
        A = als.send_matrix(np.eye(5))
        assert float(als.load_library("linalg").norm(A)) == pytest.approx(np.sqrt(5))
        assert len(als.load_library("hpc").about()) == 2  # shipped: no other scope is needed
        library = tmp_path / "own.py"
        library.write_text("")
        for refused, scope in (
            (lambda: als.run(lambda comm: 1), "run_code"),
            (lambda: als.load_library("own", library), "run_code"),
            (lambda: als.load_library("os"), "neither shipped nor installed.*run_code"),
            (lambda: als.load_library("simulator"), "run_code"),
            (lambda: als.load_matrix("/etc/passwd.npy"), "files"),
            (lambda: A.save(tmp_path / "a.npy"), "files"),
        ):
            with pytest.raises(AuthError, match=scope):
                refused()
        assert np.array_equal(A.fetch(), np.eye(5))  # the session goes on


@pytest.mark.parametrize("library", libraries.SHIPPED)
def test_shipped_libraries_need_the_same_scope_to_be_loaded_and_called(library: str) -> None:
    other = {"files": "files", "simulator": "run_code", "program": "run_code"}
    needed = other.get(library, "call")
    for body in ({"op": "load", "library": library}, {"op": "call", "library": library}):
        access.check(Token("0", "ben", ("call", needed), None), body, own=False)
        if needed != "call":  # another user of a shared gang may have loaded it
            with pytest.raises(Failure, match=f"requires a token with the scope '{needed}'"):
                access.check(Token("0", "ben", ("call",), None), body, own=False)


def test_every_command_of_a_gang_is_decided() -> None:
    """A new command is refused through gateways until its scope is declared."""
    internal = {op for op, command in COMMANDS.items() if command.scope is None}
    assert {"keep_result", "file_stamp"} <= internal
    for op in internal:
        with pytest.raises(Failure, match="does not pass on"):
            access.check(Token("0", "ben", ("admin",), None), {"op": op}, own=True)


def test_quotas_of_ranks_gangs_and_bytes(gateway: GatewayInfo, tokens: TokenFile) -> None:
    token = tokens.create("carl", ("call",), ranks=3, gangs=2, nbytes=1_000_000)
    there = {"address": gateway.address, "token": token}
    with AlchemistSession(2, **there) as first:
        with pytest.raises(ResourceError, match="4 ranks"):
            AlchemistSession(2, **there)
        with AlchemistSession(1, **there), pytest.raises(ResourceError, match="3 gangs"):
            AlchemistSession(1, **there)
        kept = first.send_matrix(np.zeros((300, 300)))
        with pytest.raises(ResourceError, match="quota"):
            first.send_matrix(np.zeros((300, 300)))
        assert "quota" in str(kept + 1)  # not that its session has ended
        kept.free()
        first.send_matrix(np.zeros((300, 300)))
    with AlchemistSession(3, **there):
        pass


def test_a_quota_of_bytes_stops_a_call_before_it_makes_its_results(
    gateway: GatewayInfo, tokens: TokenFile
) -> None:
    token = tokens.create("bob", ("call", "run_code"), nbytes=1_000_000)
    with AlchemistSession(2, address=gateway.address, token=token) as als:
        lib, v = als.load_library("linalg"), als.send_matrix(np.arange(1000.0))

        def four(comm: object) -> list[DistMatrix]:
            return [context().zeros((50_000,), float) for _ in range(4)]

        for beyond in (
            lambda: (v[:, None] * v[None, :]).computed(),
            lambda: lib.full(1000, 1000, 1.0),
            lambda: als.run(four),
        ):
            with pytest.raises(ResourceError, match="the quota of this gang's user leaves"):
                beyond()
            assert als.connection.request({"op": "status"})["nbytes"] == v.nbytes
        assert float((v[:100, None] * v[None, :100]).sum()) == 4950.0**2
        with AlchemistSession(1, address=gateway.address, token=token) as other:
            kept = other.send_matrix(np.zeros((300, 300)))
            with pytest.raises(ResourceError, match=r"320.0 kB more .* leaves 263.7 kB"):
                (v[:, None] * v[None, :40]).computed()
            del kept
        assert (v[:, None] * v[None, :40]).computed().nbytes == 320_000


def test_a_call_is_cancelled_while_bytes_are_counted(
    gateway: GatewayInfo, tokens: TokenFile
) -> None:
    token = tokens.create("gus", ("call", "run_code"), nbytes=1_000_000)
    there = {"address": gateway.address, "token": token}
    with AlchemistSession(1, **there) as als, AlchemistSession(1, **there) as other:
        lib = als.load_library("echo")
        # A gang with a call says where its ranks wait: for that it asks their proxy, for 0.5 s.
        proxy = traces.parent_of(other.list_workers()[0].pid)
        busy = Call(lambda: other.load_library("echo").sleep(60.0))
        assert traces.wait_until(other.list_calls, 60) is not None
        os.kill(proxy, signal.SIGSTOP)
        try:
            waiting = Call(lambda: lib.sleep(60.0))
            assert traces.wait_until(lambda: als.connection._channel._calls, 60) is not None
            time.sleep(0.05)  # it is sent
            als.connection.cancel()
            assert isinstance(waiting.outcome(0.0).error, CancelledError)
        finally:
            os.kill(proxy, signal.SIGCONT)
        assert als.run(lambda comm: comm.size, timeout_s=30) == 1
        other.connection.cancel()
        assert isinstance(busy.outcome(0.0).error, CancelledError)


def test_a_resize_needs_the_quota_and_a_gang_of_the_user(
    gateway: GatewayInfo, tokens: TokenFile
) -> None:
    there = {"address": gateway.address, "token": tokens.create("cleo", ("call",), ranks=3)}
    X = np.random.default_rng(0).random((200, 60))
    with AlchemistSession(1, **there) as als:
        A = als.send_matrix(X, layout="MC_MR")
        assert [worker.rank for worker in als.resize(3)] == [0, 1, 2]
        assert als.connection.grid == (1, 3)
        np.testing.assert_array_equal(A.fetch(), X)
        np.testing.assert_allclose((A @ A.T).fetch(), X @ X.T)
        with pytest.raises(ResourceError, match="4 ranks"):
            als.resize(4)
        with pytest.raises(ResourceError, match="num_workers"):
            als.resize(0)
        als.resize(2)
        np.testing.assert_array_equal(als.send_matrix(X, layout="STAR_STAR").fetch(), X)
        assert len(als.list_workers()) == 2


def test_another_user_cannot_resize_a_gang(there: dict[str, Any], tokens: TokenFile) -> None:
    other = there | {"token": tokens.create("olga", ("call",))}
    with AlchemistSession(1, **there, name="anna-resizes", lifetime="detached") as als:
        als.send_matrix(np.ones((30, 30)), name="A")
    with AlchemistSession.attach("anna-resizes", **other) as attached:
        with pytest.raises(AuthError, match="admin"):
            attached.resize(2)
        assert len(attached.list_workers()) == 1
        assert attached.matrix("A").fetch().sum() == 900
    with AlchemistSession.attach("anna-resizes", **there) as als:
        als.resize(2)
        assert als.matrix("A").fetch().sum() == 900
    AlchemistSession.stop_gang("anna-resizes", **there)


def test_a_detached_gang_is_its_owners_after_a_restart_of_the_gateway(
    there: dict[str, Any], tokens: TokenFile
) -> None:
    with AlchemistSession(1, **there, name="anna-stops", lifetime="detached"):
        pass
    restarted, body = SessionCommands(tokens), {"op": "stop_gang", "name": "anna-stops"}
    with pytest.raises(Failure, match="was not started by odo through a gateway"):
        restarted.carry_out(Token("0", "odo", ("call",)), body)
    restarted.carry_out(Token("0", "anna", ("call",)), body)
    assert all(gang.name != "anna-stops" for gang in AlchemistSession.list())


def test_a_launcher_whose_ports_are_open_needs_admin(there: dict[str, Any]) -> None:
    with pytest.raises(AuthError, match="launcher='hydra': this requires a token with"):
        AlchemistSession(1, **there, launcher="hydra")


def test_two_tokens_of_a_process_do_not_share_the_connection_to_a_gang(
    there: dict[str, Any], tokens: TokenFile
) -> None:
    """The second session would have the rights of the first: a web service has many users."""
    other = there | {"token": tokens.create("otto", ("call",))}
    with AlchemistSession(1, **there, name="anna-s", lifetime="detached") as als:
        als.send_matrix(np.ones(3), name="A")
        with pytest.raises(AuthError, match="to gang anna-s with another token"):
            AlchemistSession.attach("anna-s", **other)
        with AlchemistSession.attach("anna-s", **there) as again:
            assert again.matrix("A").fetch().sum() == 3
        assert als.matrix("A").fetch().sum() == 3  # the refusal has not closed it
    with (
        AlchemistSession.attach("anna-s", **other) as attached,
        pytest.raises(AuthError, match="you may read its matrices"),
    ):
        attached.matrix("A").free()
    AlchemistSession.stop_gang("anna-s", **there)


def test_others_may_only_read_a_named_gang_and_its_group_may_change_it(
    gateway: GatewayInfo, tokens: TokenFile
) -> None:
    there = {"address": gateway.address}
    owner = {**there, "token": tokens.create("ida", groups=["lab"])}
    member = {**there, "token": tokens.create("jon", groups=["lab", "other"])}
    reader = {**there, "token": tokens.create("kim", ("call", "run_code"), groups=["other"])}
    # One after the other: sessions of a process share their connection to a gang.
    with AlchemistSession(1, **owner, name="ida-s", lifetime="detached") as als:
        als.send_matrix(np.ones((30, 30)), name="A")
    with AlchemistSession.attach("ida-s", **reader) as attached:
        seen = attached.matrix("A")
        assert seen.fetch().sum() == 900
        assert [one.name for one in attached.list_matrices()] == ["A"]
        for refused in (
            lambda: attached.send_matrix(np.ones(3)),
            lambda: seen.free(),
            lambda: attached.connection.request({"op": "pin", "matrices": [seen.id]}),
            lambda: (seen + 1).fetch(),
            lambda: attached.load_library("linalg"),
            lambda: attached.run(lambda comm: 1),
            lambda: put(attached, seen),
        ):
            with pytest.raises((AuthError, Failure), match="you may read its matrices"):
                refused()
        assert "you may read its matrices" in repr(seen)
    with AlchemistSession.attach("ida-s", **member) as attached:
        assert float((attached.matrix("A") + 1).sum()) == 1800
        attached.matrix("A").free()
    with AlchemistSession.attach("ida-s", **reader) as attached:
        assert not attached.list_matrices()
    AlchemistSession.stop_gang("ida-s", **owner)


def target_of(als: AlchemistSession, handle: Any) -> TransferTarget:
    distribution = Distribution(handle.layout, handle.stored_shape, als.connection.grid)
    return TransferTarget(handle.id, distribution, handle.dtype)


def put(als: AlchemistSession, handle: Any) -> None:
    """Write into a matrix over a data connection."""
    with MatrixWriter(als.connection.nodes, target_of(als, handle)) as writer:
        writer.write_block(np.zeros(handle.shape), (0, 0))


def test_gangs_of_the_cluster_are_changed_by_those_who_may_run_code_and_its_group() -> None:
    nobody = TokenFile("/nowhere/tokens.json")
    for scopes, groups, allowed in (
        (("call",), (), False),
        (("call",), ("lab",), False),
        (("call",), ("cluster",), True),
        (("call", "run_code"), (), True),
        (("admin",), (), True),
    ):
        token = Token("0", "ben", scopes, groups=groups)
        assert access.may_change(token, "", nobody) is allowed
        assert access.may_change(token, "anna", nobody) is ("admin" in scopes)
        assert access.may_change(token, "ben", nobody)


def test_gangs_of_a_revoked_token_are_ended_if_that_is_asked_for(
    gateway: GatewayInfo, tokens: TokenFile, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = (
        {"address": gateway.address, "token": tokens.create(user)} for user in ("moira", "nora")
    )
    with (
        AlchemistSession(1, name="moiras", lifetime="detached", **mine),
        AlchemistSession(1, name="noras", **other) as noras,
    ):
        ident = mine["token"].split("_")[1]
        asked = ["token", "--tokens", str(tokens.path), "revoke", ident, "--stop-gangs"]
        assert main(asked) == 0
        assert "gang moiras has ended\n" in capsys.readouterr().out
        assert [gang.name for gang in AlchemistSession.list(**other)] == ["noras"]
        assert noras.send_matrix(np.eye(3)).fetch().sum() == 3


def test_of_two_tokens_of_a_user_the_smaller_quota_counts(
    gateway: GatewayInfo, tokens: TokenFile
) -> None:
    large = tokens.create("lea", ranks=4, nbytes=10_000_000)
    small = tokens.create("lea", ranks=2, gangs=5)
    there = {"address": gateway.address}
    with AlchemistSession(1, **there, token=large) as als:
        for token in (large, small):
            with pytest.raises(ResourceError, match=r"3 ranks, more than .* tokens, 2"):
                AlchemistSession(2, **there, token=token)
        with (
            AlchemistSession(1, **there, token=small) as other,
            pytest.raises(ResourceError, match="quota"),
        ):
            other.send_matrix(np.zeros((1200, 1200)))
        tokens.revoke(small.split("_")[1])
        with AlchemistSession(3, **there, token=large):
            assert als.send_matrix(np.eye(3)).fetch().sum() == 3


def test_private_gangs_of_others_cannot_be_used(there: dict[str, Any], tokens: TokenFile) -> None:
    here = there | {"token": tokens.create("dora", ("call", "run_code"))}
    with AlchemistSession(1, **there) as als:
        gang = als.connection.address.gang
        assert gang not in {one.name for one in AlchemistSession.list(**here)}
        with pytest.raises((SessionError, AuthError, GroupFailedError)):
            AlchemistSession.attach(gang, **here)
        with pytest.raises(AuthError, match="admin"):
            AlchemistSession.stop_gang(gang, **here)
        assert als.run(lambda comm: comm.size) == 1
        seen = AlchemistSession.list(**there | {"token": tokens.create("root", ("admin",))})
        assert gang in {one.name for one in seen}


def test_the_name_of_a_gang_that_an_operator_has_stopped_is_free(
    there: dict[str, Any], tokens: TokenFile
) -> None:
    operators = there | {"token": tokens.create("root", ("admin",))}
    with AlchemistSession(1, **there, name="stopped") as als:
        AlchemistSession.stop_gang("stopped", **operators)
        als.request_workers(1)
        assert als.run(lambda comm: comm.size) == 1
        AlchemistSession.stop_gang("stopped", **operators)
    with AlchemistSession(1, **there, name="stopped") as als:
        assert als.run(lambda comm: comm.size) == 1


def test_calls_are_in_the_audit_log(gateway: GatewayInfo, tokens: TokenFile) -> None:
    with AlchemistSession(
        1, address=gateway.address, token=tokens.create("emil", ("call", "run_code"))
    ) as als:
        als.load_library("linalg").norm(als.send_matrix(np.eye(3)))
    lines = map(json.loads, Path(gateway.audit).read_text().splitlines())
    mine = [line for line in lines if line.get("user") == "emil"]
    assert {"session", "start_gang", "call", "end_gang"} <= {line["event"] for line in mine}
    (call,) = (line for line in mine if line.get("routine") == "norm")
    assert call["library"] == "linalg"
    assert call["seconds"] > 0


def test_a_revoked_token_ends_transfers_on_open_connections(
    gateway: GatewayInfo, tokens: TokenFile
) -> None:
    text = tokens.create("finn", ("call",))
    with AlchemistSession(1, address=gateway.address, token=text) as als:
        A = als.send_matrix(np.eye(700))
        target = target_of(als, A)
        out = np.empty(A.shape)

        def read() -> None:
            with MatrixReader(als.connection.nodes, target) as reader:
                reader.read_block(out, (0, 0))

        read()
        tokens.revoke(text.split("_")[1])
        with pytest.raises(Failure, match=r"revoked|unknown token"):
            read()
        with pytest.raises(AuthError, match="revoked"):
            als.list_matrices()
    assert np.array_equal(out, np.eye(700))


def test_the_command_line_creates_lists_and_revokes_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ["--tokens", str(tmp_path / "tokens.json")]
    create = ["create", "anna", "--scopes", "call,files", "--groups", "lab", "--bytes", "2G"]
    assert main(["token", *file, *create]) == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith("alch_")
    assert main(["token", *file, "list"]) == 0
    listed = capsys.readouterr().out
    assert "anna" in listed
    assert "call,files" in listed
    assert "groups=lab bytes=2000000000" in listed
    assert time.strftime("expires %Y-%m-%d", time.gmtime(time.time() + 90 * 86400)) in listed
    assert main(["token", *file, "create", "ben", "--days", "never"]) == 0
    capsys.readouterr()
    assert main(["token", *file, "list"]) == 0
    assert "expires never" in capsys.readouterr().out
    ident = text.split("_")[1]
    assert main(["token", *file, "revoke", "anna"]) == 1
    assert f"those of user anna are {ident}" in capsys.readouterr().err
    assert main(["token", *file, "revoke", ident]) == 0
    assert main(["token", *file, "revoke", ident]) == 1
    assert "there is no token" in capsys.readouterr().err
    assert main(["token", *file, "create", "a b"]) == 1
    assert main(["token", *file, "create", "carl", "--ranks=-1"]) == 1
    assert "ranks must not be negative; got -1" in capsys.readouterr().err


def test_matrices_that_are_created_at_the_same_time_count_together(
    gateway: GatewayInfo, tokens: TokenFile
) -> None:
    token = tokens.create("hugo", ("call",), nbytes=1_000_000)
    body = {"op": "create", "shape": [300, 300], "dtype": "float64", "layout": "MC_MR"}
    with AlchemistSession(1, address=gateway.address, token=token) as als:
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(als.connection.request, body | {"send": str(i)}) for i in range(8)]
        errors = [call.exception() for call in asked]
        assert errors.count(None) == 1, errors
        assert all("quota" in str(error) for error in errors if error is not None)
        made = next(call.result()["matrix"] for call in asked if call.exception() is None)
        als.connection.request({"op": "free", "matrices": [made]})
        als.connection.request(body | {"send": "another"})


def test_a_malformed_command_is_answered_also_where_bytes_are_counted(
    gateway: GatewayInfo, tokens: TokenFile
) -> None:
    token = tokens.create("gina", ("call",), nbytes=1_000_000)
    with AlchemistSession(1, address=gateway.address, token=token) as als:
        body = {"op": "create", "send": "x", "shape": [2, 2], "dtype": "float64"}
        body["layout"] = "VC_STAR"
        for wrong in ({"dtype": "no dtype"}, {"shape": [10**18] * 20}):
            call = Call(lambda wrong=wrong: als.connection.request(body | wrong))
            assert "malformed command 'create'" in str(call.outcome(0.0, 20).error)
        assert als.send_matrix(np.eye(3)).fetch().sum() == 3
