"""Output of ranks is printed by the caller that waits, with the rank number."""

from __future__ import annotations

import ctypes
import io
import os
import re
import sys
import threading
import time
from typing import Any

import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import CallTimeoutError, RoutineError


def total(comm: Any) -> int:
    ranks: int = comm.allreduce(comm.rank)
    return ranks


def test_printed_lines_name_their_rank(
    als: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def speak(comm: Any) -> None:
        libc = ctypes.CDLL(None)
        print("one")
        libc.puts(b"two, from C")
        print("three", end="", flush=True)
        sys.stderr.write("an error\n")
        os.write(1, b" and four\nfive without an end")

    als.run(speak)
    told = capsys.readouterr()
    for rank in range(3):
        mine = [line for line in told.out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert [line.partition("] ")[2] for line in mine] == [
            "one", "two, from C", "three and four", "five without an end",
        ]  # fmt: skip
        assert f"[rank {rank}] an error\n" in told.err
    als.load_library("echo").say("hello")
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {r}] hello" for r in range(3)]


def test_prints_are_shown_as_they_are_printed_and_before_the_result(
    als: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[float, str]] = []

    class Screen:
        def write(self, text: str) -> None:
            shown.append((time.monotonic(), text))

        def flush(self) -> None: ...

    def slowly(comm: Any) -> None:
        if comm.rank == 1:
            for i in range(3):
                print("step", i)
                time.sleep(0.3)

    def fails(comm: Any) -> None:
        print("before", end="")
        raise ValueError

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Screen())
        als.run(slowly)
        assert [text for _, text in shown] == [f"[rank 1] step {i}\n" for i in range(3)]
        assert shown[2][0] - shown[0][0] > 0.4
        shown.clear()
        with pytest.raises(RoutineError) as failed:
            als.run(fails)
        # The other ranks may have been interrupted before they printed.
        assert f"[rank {failed.value.rank}] before\n" in "".join(text for _, text in shown)


def test_a_flood_of_output_is_cut_and_the_loss_reported(
    als: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def flood(comm: Any) -> int:
        if comm.rank == 0:
            line = b"x" * 199 + b"\n"
            for _ in range(300):
                os.write(1, line * 500)
        return 300 * 500 * 200

    nbytes = als.run(flood)
    told = capsys.readouterr()
    dropped = sum(map(int, re.findall(r"(\d+) bytes of output dropped", told.err)))
    shown = sum(len(line) - len("[rank 0] ") + 1 for line in told.out.splitlines())
    assert shown + dropped == nbytes
    assert als.run(total) == 3


def test_lines_between_calls_come_with_the_next_call(
    als: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def starts(comm: Any) -> None:
        def ticks() -> None:
            for i in range(8):
                time.sleep(0.05)
                print("tick", i)

        threading.Thread(target=ticks, daemon=True).start()

    als.run(starts)
    time.sleep(0.2)
    als.run(total)
    time.sleep(1.0)
    als.send_matrix([[1.0]]).free()  # is no call
    als.run(total)
    told = capsys.readouterr().out.splitlines()
    for rank in range(3):
        mine = [line for line in told if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] tick {i}" for i in range(8)]


@pytest.mark.parametrize("kind", ["none", "closed"])
def test_a_process_without_streams_gets_its_results(
    als: AlchemistSession, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def speaks(comm: Any) -> int:
        print("hello")
        sys.stderr.write("hello\n")
        return 7

    stream = None if kind == "none" else io.StringIO()
    if stream is not None:
        stream.close()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        patched.setattr(sys, "stderr", stream)
        found = als.run(speaks)
        A = als.send_matrix([[1.0]], print_times=True)
        fetched = als.fetch_matrix(A, print_times=True)
    assert (found, fetched.tolist()) == (7, [[1.0]])


def test_output_can_be_silenced(cluster: str, capfd: pytest.CaptureFixture[str]) -> None:
    with AlchemistSession(1, output=False) as als:
        als.run(lambda comm: print("silence"))
        als.load_library("echo").say("silence")
    told = capfd.readouterr()
    assert "silence" not in told.out + told.err


def test_ranks_of_mpiexec_speak_as_well(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    with AlchemistSession(2, launcher="mpiexec") as als:
        assert als.run(lambda comm: print("here I am") or comm.allreduce(1)) == 2
        with pytest.raises(CallTimeoutError):
            als.run(lambda comm: time.sleep(60), timeout_s=0.2)
        assert als.run(total) == 1
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == ["[rank 0] here I am", "[rank 1] here I am"]
