"""The file of tokens and the audit log, and what goes wrong with them."""

from __future__ import annotations

import fcntl
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from alchemist_ray.errors import AuthError, BadArgumentError
from alchemist_ray.gateway.protocol import parts_of
from alchemist_ray.gateway.server import access
from alchemist_ray.gateway.server.access import MOST, Audit, TokenFile

TOGETHER = 12


def test_tokens_that_are_created_and_revoked_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    old = [parts_of(TokenFile(path).create("anna"))[0] for _ in range(TOGETHER)]
    with ThreadPoolExecutor(2 * TOGETHER) as pool:
        created = [pool.submit(TokenFile(path).create, "ben") for _ in old]
        revoked = [pool.submit(TokenFile(path).revoke, ident) for ident in old]
    new = {parts_of(one.result())[0] for one in created}
    assert all(one.result().user == "anna" for one in revoked)
    assert {token.id for token in TokenFile(path).list()} == new


def test_a_lock_that_another_process_holds_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "LOCK_TIMEOUT_S", 0.2)
    path = tmp_path / "tokens.json"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(AuthError, match=r"tokens\.json\.lock has been held by another process"):
            TokenFile(path).create("anna")
    assert TokenFile(path).create("anna")


@pytest.mark.parametrize("scopes", [("files",), ("run_code", "files"), ()])
def test_a_token_needs_the_scope_call_or_admin(tmp_path: Path, scopes: tuple[str, ...]) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    with pytest.raises(BadArgumentError, match="allow nothing without 'call'"):
        file.create("ben", scopes)
    assert not file.list()
    file.create("ben", ("admin",))


def test_a_file_that_cannot_be_read_is_an_error_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder", tmp_path / "file" / "tokens.json"):
        with pytest.raises(AuthError, match=r"cannot be read: .*directory"):
            TokenFile(path).find("0")


def test_a_line_of_the_audit_log_is_short(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.log")
    long = "x" * (1 << 20)
    audit.write(long, user="anna", shape=[3, 4], name=long, gang={long: 1}, path={b"key": 1})
    audit.close()
    text = audit.path.read_text()
    assert len(text) < 5 * MOST
    line = json.loads(text)
    assert (line["user"], line["shape"], line["name"]) == ("anna", [3, 4], long[:MOST])
