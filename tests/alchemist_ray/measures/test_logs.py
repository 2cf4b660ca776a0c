"""Log files of gangs, and ``alchemist logs``."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from alchemist_ray import AlchemistSession, cli
from alchemist_ray.errors import GroupRecoveredError
from alchemist_ray.measures import logs
from mpi_workers.node import rank_output
from mpi_workers.node.cleanup import PrivateFolder
from mpi_workers.protocol.proxy_messages import STDERR, STDOUT


def printed(session: AlchemistSession, text: str) -> None:
    def says(comm: Any) -> None:
        print(f"{text} {comm.rank}")
        print("and an error", file=sys.stderr)

    session.run(says)


@pytest.fixture(scope="module")
def talking(cluster: str) -> Iterator[AlchemistSession]:
    with AlchemistSession(2, name="talking", output=False) as session:
        printed(session, "good morning from")
        yield session


def test_output_of_all_ranks_is_kept_with_time_rank_and_stream(
    talking: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", "talking"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        text = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}} \[{rank}\] out good morning from {rank}"
        assert sum(re.fullmatch(text, line) is not None for line in lines) == 1, lines
    assert sum(line.endswith("err and an error") for line in lines) == 2
    assert any("[manager] INFO" in line and "gang started" in line for line in lines)
    assert lines == sorted(lines, key=lambda line: line[:23])


def test_one_rank_and_the_last_lines(
    talking: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", "talking", "--rank", "1", "--lines", "1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert " [1] " in line
    assert cli.main(["logs", "talking", "--rank", "7"]) == 0
    assert "has no lines of rank 7" in capsys.readouterr().err


def test_new_lines_follow(
    talking: AlchemistSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def then(_: float) -> None:
        if "again from 1" in (out := capsys.readouterr().out):
            seen.append(out)
            raise KeyboardInterrupt
        rounds.append(out)
        assert len(rounds) < 100
        if len(rounds) == 1:
            printed(talking, "again from")

    seen: list[str] = []
    rounds: list[str] = []
    monkeypatch.setattr(logs.time, "sleep", then)
    assert cli.main(["logs", "talking", "--follow"]) == 0
    assert "good morning" not in seen[0], "lines are shown once"


def test_the_log_of_a_gang_that_was_lost_says_why(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(comm: Any) -> None:
        print(f"last words of {comm.rank}", flush=True)
        os.kill(os.getpid(), 9)

    with (
        AlchemistSession(1, name="lost", output=False) as session,
        pytest.raises(GroupRecoveredError),
    ):
        session.run(dies)
    assert cli.main(["logs", "lost"]) == 0
    out = capsys.readouterr().out
    assert "[0] out last words of 0" in out
    assert re.search(r"\[manager\] ERROR .*ranks lost: rank 0 .*SIGKILL", out)


def test_a_gang_without_logs_is_named(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", "nothing"]) == 1
    assert "no node of the Ray cluster has logs of a gang 'nothing'" in capsys.readouterr().err


def test_the_files_are_for_their_owner_only(talking: AlchemistSession) -> None:
    log = logs.read("talking", {})
    assert log is not None
    folder = logs.folder(log.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert talking.connection.address.token not in (folder / logs.MANAGER).read_text()


def test_json_and_the_level_are_chosen_by_the_environment(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALCHEMIST_LOG_FORMAT", "json")
    monkeypatch.setenv("ALCHEMIST_LOG_LEVEL", "debug")
    with AlchemistSession(1, name="as-json") as session:
        session.run(lambda comm: comm.size)
        token = session.connection.address.token
    log = logs.read("as-json", {})
    assert log is not None
    assert token not in str(log.lines)
    entries = [json.loads(line) for line in log.lines[logs.MANAGER]]
    assert {"info", "debug"} <= {entry["level"] for entry in entries}
    assert any("ok after" in entry["message"] for entry in entries)


def test_the_level_is_that_of_the_programs_logger(cluster: str) -> None:
    own = logging.getLogger("alchemist_ray")
    before = own.level
    own.setLevel(logging.WARNING)
    try:
        with AlchemistSession(1, name="quiet") as session:
            session.run(lambda comm: comm.size)
    finally:
        own.setLevel(before)
    log = logs.read("quiet", {})
    assert log is None or not log.lines.get(logs.MANAGER)


def test_a_file_that_is_full_is_put_aside(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_output, "FILE_LIMIT", 1000)
    written = rank_output.RankLogs(str(tmp_path / "alchemist" / "g1"))
    for i in range(100):
        written.write([(3, STDOUT, f"line {i}"), (3, STDERR, "x" * 20), (-1, STDOUT, "launched")])
    files = {path.name: path.stat().st_size for path in (tmp_path / "alchemist" / "g1").iterdir()}
    assert {"rank3.log", "rank3.log.1", "launcher.log"} <= set(files)
    assert max(files.values()) < 1200
    assert "line 99" in (tmp_path / "alchemist" / "g1" / "rank3.log").read_text()


def test_folders_of_old_gangs_go(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_output, "FOLDERS_KEPT", 3)
    for i in range(6):
        rank_output.RankLogs(str(tmp_path / "alchemist" / f"g{i}")).write([(0, STDOUT, "x")])
        os.utime(tmp_path / "alchemist" / f"g{i}", (i, i))
    assert len(list((tmp_path / "alchemist").iterdir())) == 3
    assert (tmp_path / "alchemist" / "g5").is_dir()


@pytest.mark.parametrize("owner", ["", "manager-"])
def test_folders_of_old_gangs_stay_while_they_run(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    monkeypatch.setattr(rank_output, "FOLDERS_KEPT", 1)
    running = PrivateFolder(f"{owner}g0123456789.2")
    names = ["a.b.g0123456789", "g1", "g2"]
    try:
        for i, name in enumerate(names):
            rank_output.make_folder(tmp_path / "alchemist" / name)
            os.utime(tmp_path / "alchemist" / name, (i, i))
        assert {path.name for path in (tmp_path / "alchemist").iterdir()} == {names[0], names[2]}
    finally:
        running.remove()


def test_a_disk_that_fails_ends_the_logging_only(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "alchemist").write_text("a file where the folder should be")
    written = rank_output.RankLogs(str(tmp_path / "alchemist" / "g1"))
    written.write([(0, STDOUT, "x")])
    written.write([(0, STDOUT, "y")])
    assert capsys.readouterr().out.count("no longer written") == 1


def test_a_line_is_read_when_it_is_whole(tmp_path: Any) -> None:
    path = tmp_path / "rank0.log"
    path.write_bytes(b"one\ntw")
    lines, position = logs._after(path, -1)
    assert (lines, position) == (["one"], 4)
    with open(path, "ab") as file:
        file.write(b"o\nthree\n")
    assert logs._after(path, position)[0] == ["two", "three"]
