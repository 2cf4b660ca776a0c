"""The library ``hpc``: facts about ranks, and their speed."""

from __future__ import annotations

import json
import os

from mpi_workers.testing import local_gang

WRONG = {
    "n=0: it must be a whole number from 1": ["matmul", {"n": 0}],
    "nbytes=0: it must be a whole number from 1": ["copy", {"nbytes": 0}],
    "are not two different ranks of 2": ["ping_pong", {"sizes": [8], "second": 0}],
    "sizes=-1: it must be a whole number from 0": ["ping_pong", {"sizes": [-1]}],
    "sizes=7: it must be a whole number from 8": ["allreduce", {"sizes": [8, 7]}],
}


def test_bad_arguments_are_refused_and_the_gang_remains_usable() -> None:
    failures = local_gang.run("tests.ali.ranks_hpc:refusals", 2, list(WRONG.values()))
    for words, (kind, message) in zip(WRONG, failures, strict=True):
        assert kind == "BadArgumentError"
        assert words in message


def test_each_rank_names_its_mpi_library() -> None:
    ranks = [json.loads(text) for text in local_gang.run("tests.ali.ranks_hpc:identities", 3)]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert {rank["size"] for rank in ranks} == {3}
    assert len({rank["pid"] for rank in ranks}) == 3
    for rank in ranks:
        assert os.path.isfile(rank["library"])
        assert "MPI" in rank["version"]
        assert rank["family"] in ("MPICH ABI", "Open MPI", "standard MPI ABI")
        assert rank["addresses"] == []  # all on one host
        assert rank["host"] == os.uname().nodename


def test_measured_rates_and_times_are_plausible() -> None:
    found = local_gang.run("tests.ali.ranks_hpc:everything", 2)
    assert len(found["matmul"]) == len(found["copy"]) == 2
    assert all(0.01 < rate < 10_000 for rate in (*found["matmul"], *found["copy"]))
    assert all(1e-8 < time < 10 for time in (*found["ping_pong"], *found["allreduce"]))
    # Messages of 64 MiB cannot be as fast as empty ones.
    assert found["ping_pong"][2] > found["ping_pong"][0]
