"""The output of ranks, cut into lines."""

from __future__ import annotations

import os
from pathlib import Path

from mpi_workers.node.rank_output import HELD_LIMIT, LINE_LIMIT, OutputLines, RankOutput
from mpi_workers.protocol.proxy_messages import STDERR, STDOUT


def test_lines_are_whole_whatever_the_pieces() -> None:
    lines = OutputLines()
    for piece in (b"on", b"e\ntw", b"o\n\nthr"):
        lines.add(3, STDOUT, piece)
    lines.add(3, STDERR, b"apart\n")
    lines.add(1, STDOUT, "Grüße".encode()[:3])
    assert lines.take() == [(3, 1, "one"), (3, 1, "two"), (3, 1, ""), (3, 2, "apart")]
    assert not lines
    lines.add(1, STDOUT, "Grüße\n".encode()[3:])
    lines.finish(3)
    lines.finish(1)
    assert lines.take() == [(1, 1, "Grüße"), (3, 1, "thr")]


def test_a_line_without_end_is_cut() -> None:
    lines = OutputLines()
    lines.add(0, STDOUT, b"x" * (LINE_LIMIT + 1))
    assert [len(text) for _, _, text in lines.take()] == [LINE_LIMIT]
    lines.finish(0)
    assert lines.take() == [(0, STDOUT, "x")]


def test_the_log_file_has_what_is_not_shown(tmp_path: Path) -> None:
    output, line = RankOutput(str(tmp_path / "logs" / "gang")), b"x" * 3_000_000
    read, write = os.pipe()
    os.set_blocking(read, False)
    output.pipes[2, STDOUT] = read
    for start in range(0, len(line), 1 << 16):
        os.write(write, line[start : start + (1 << 16)])
        output.read((2, STDOUT))
    os.write(write, b"\nlast\n")
    output.read((2, STDOUT))
    shown = output.take()
    assert sum(len(text) for *_, text in shown) < HELD_LIMIT + 1000
    assert "bytes of output dropped: printed faster than shown" in shown[-1][2]
    assert "rank2.log, which has them" in shown[-1][2]
    logged = [row.split(" ", 3) for row in (tmp_path / "logs/gang/rank2.log").open()]
    assert "".join(row[3].strip() for row in logged) == line.decode() + "last"
    for end in (read, write):
        os.close(end)


def test_more_than_fits_is_dropped_and_told() -> None:
    lines = OutputLines()
    for _ in range(3):
        lines.add(0, STDOUT, (b"y" * 99 + b"\n") * (HELD_LIMIT // 100))
    lines.add(2, STDOUT, b"short\n" * 100)
    assert lines.nbytes <= HELD_LIMIT
    taken = lines.take()
    kept = sum(len(text) + 1 for rank, _, text in taken if text.startswith("y"))
    notes = [(rank, text) for rank, stream, text in taken if stream == STDERR]
    assert notes[0][0] == 0
    assert f"{3 * (HELD_LIMIT // 100) * 100 - kept} bytes" in notes[0][1]
    lines.add(0, STDOUT, b"again\n")
    assert lines.take() == [(0, STDOUT, "again")]


def test_an_abort_of_a_program_is_not_taken_for_one_of_its_rank() -> None:
    output = RankOutput()
    read, write = os.pipe()
    os.set_blocking(read, False)
    output.pipes[2, STDERR] = read
    os.write(write, b"Abort(7) on node 2 (rank 2 in comm 0): application called MPI_Abort\n")
    output.read((2, STDERR))
    assert output.aborted() == (2, "called MPI_Abort(7)")
    output.begin_call()
    assert output.aborted() == (2, "called MPI_Abort(7)")  # of a rank that ended a moment later
    output.tail_of_call(2)  # of a program that failed
    assert output.aborted() is None
    for end in (read, write):
        os.close(end)
