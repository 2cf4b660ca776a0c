"""The value that tells MPICH which ranks share a node."""

from __future__ import annotations

import re

import pytest

from mpi_workers.wire.pmi import NO_SPAWN, VALUE_LIMIT, PmiNode, process_mapping


def expanded(mapping: str) -> list[int]:
    """Ranks per node, as MPICH reads them."""
    counts: list[int] = []
    for first, nodes, ranks in re.findall(r"\((\d+),(\d+),(\d+)\)", mapping):
        assert int(first) == len(counts)
        counts += [int(ranks)] * int(nodes)
    return counts


@pytest.mark.parametrize(
    "counts", [[4], [2, 2], [2, 3], [1, 2, 2, 1], [128] * 64, [128] * 200 + [7]]
)
def test_equal_neighbours_share_an_entry(counts: list[int]) -> None:
    mapping = process_mapping(counts)
    assert expanded(mapping) == counts
    assert len(mapping) < VALUE_LIMIT


def test_a_mapping_that_is_too_long_is_not_sent() -> None:
    sent: list[str] = []
    for counts in ([2] * 200, [1, 2] * 100):
        node = PmiNode(
            "job", sum(counts), [0], process_mapping(counts),
            send=lambda rank, line: sent.append(line), barrier=print, abort=print, say=print,
        )  # fmt: skip
        node.line(0, "cmd=get kvsname=job key=PMI_process_mapping")
    assert sent[0] == "cmd=get_result rc=0 value=(vector,(0,200,2))"
    assert sent[1].startswith("cmd=get_result rc=-1")


def test_a_request_to_spawn_gets_one_refusal() -> None:
    sent: list[str] = []
    said: list[tuple[int, str]] = []
    node = PmiNode(
        "job", 2, [0, 1], "", send=lambda rank, line: sent.append(f"{rank} {line}"), barrier=print,
        abort=print, say=lambda rank, text: said.append((rank, text)),
    )  # fmt: skip
    for line in ("mcmd=spawn", "nprocs=1", "execname=/bin/true", "cmd=x", "endcmd"):
        node.line(1, line)
    node.line(1, "cmd=finalize")
    assert sent == ["1 cmd=spawn_result rc=-1 msg=not_supported", "1 cmd=finalize_ack rc=0"]
    assert said == [(1, NO_SPAWN)]
