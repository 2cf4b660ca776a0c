"""The library ``hpc``: facts about ranks, and their speed."""

from __future__ import annotations

import json
import os

import pytest

from tests.support import launches

WRONG = {
    "n=0: it must be a whole number from 1": ["dgemm", {"n": 0}],
    "nbytes=0: it must be a whole number from 1": ["stream", {"nbytes": 0}],
    "are not two different ranks of 2": ["ping_pong", {"sizes": [8], "second": 0}],
    "sizes=-1: it must be a whole number from 0": ["ping_pong", {"sizes": [-1]}],
    "sizes=0: it must be a whole number from 1": ["ring", {"sizes": [0]}],
    "sizes=7: it must be a whole number from 8": ["allreduce", {"sizes": [8, 7]}],
}
WRONG_BYTES = {"seconds": 0.0, "fault": 1.0}
# An error that rank 0 makes before the validation.
FAULTS = {
    "dgemm: the error": ["dgemm", {"n": 50, "seconds": 0.0, "fault": 1e-8}],
    "stream: the error": ["stream", {"nbytes": 8000, "seconds": 0.0, "fault": 1e-6}],
    "ping_pong: wrong bytes: the error 1": ["ping_pong", {**WRONG_BYTES, "sizes": [0, 8]}],
    "ring: wrong bytes in messages of 8 B: the error": ["ring", {**WRONG_BYTES, "sizes": [8]}],
}


def test_bad_arguments_are_refused_and_the_gang_remains_usable() -> None:
    failures = launches.run("tests.ali.ranks_hpc:refusals", 2, list(WRONG.values()))
    for words, said in zip(WRONG, failures, strict=True):
        assert said.startswith("BadArgumentError: ")
        assert words in said


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_wrong_result_fails_its_validation_on_all_ranks(ranks: int) -> None:
    failures = launches.run("tests.ali.ranks_hpc:refusals", ranks, list(FAULTS.values()))
    for words, said in zip(FAULTS, failures, strict=True):
        assert said.startswith("RoutineError: ")
        assert words in said
        assert "exceeds the limit" in said


def test_each_rank_names_its_mpi_library() -> None:
    ranks = [json.loads(text) for text in launches.run("tests.ali.ranks_hpc:identities", 3)]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert {rank["size"] for rank in ranks} == {3}
    assert len({rank["pid"] for rank in ranks}) == 3
    for rank in ranks:
        assert os.path.isfile(rank["library"])
        assert "MPI" in rank["version"]
        assert rank["family"] in ("MPICH ABI", "Open MPI", "standard MPI ABI")
        assert rank["addresses"] == []  # all on one host
        assert rank["host"] == os.uname().nodename


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_measured_rates_and_times_are_plausible_and_valid(ranks: int) -> None:
    found = launches.run("tests.ali.ranks_hpc:everything", ranks)
    rates, residual = found["dgemm"]
    assert len(rates) == ranks
    assert all(0.01 < rate < 10_000 for rate in rates)
    assert 0 < residual < 16
    *kernels, error = found["stream"]
    assert [len(rates) for rates in kernels] == [ranks] * 4
    assert all(0.001 < rate < 10_000 for rates in kernels for rate in rates)
    assert error == 0  # the same operations in the same order
    assert all(1e-8 < time < 10 for time in found["allreduce"])
    if ranks > 1:
        assert all(1e-8 < time < 10 for times in found["ring"] for time in times)
        assert all(1e-8 < time < 10 for time in found["ping_pong"])
        # Messages of 64 MiB cannot be as fast as empty ones.
        assert found["ping_pong"][2] > found["ping_pong"][0]


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ("abbc", {"within a node": [1, 2], "between nodes": [0, 1]}),
        ("ab", {"between nodes": [0, 1]}),
        ("a", {}),
    ],
)
def test_pairs_lie_on_one_node_and_on_two(hosts: str, found: dict[str, list[int]]) -> None:
    assert launches.run("tests.ali.ranks_hpc:pairs_of", 1, list(hosts)) == found
