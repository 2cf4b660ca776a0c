"""What the doctor makes of what ranks say: real ones, and one that says something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alchemist_ray.observe.doctor import ranks
from alchemist_ray.observe.doctor.finding import BAD, OK, WARN, Expected, Finding
from mpi_workers.testing import local_gang

NOTHING = Expected()


@pytest.fixture(scope="module")
def said() -> list[dict[str, Any]]:
    """What three real ranks say of themselves."""
    return [json.loads(text) for text in local_gang.run("tests.ali.ranks_hpc:identities", 3)]


def judged(
    said: list[dict[str, Any]], expected: Expected = NOTHING, **of_the_last: Any
) -> dict[str, Finding]:
    """The findings by check, with something else in the last rank's mouth."""
    told = [*said[:-1], {**said[-1], **of_the_last}]
    return {f.check: f for f in ranks.judged(told, expected, {"10.0.0.2": "eth1"})}


def test_sound_ranks_are_sound(said: list[dict[str, Any]]) -> None:
    found = judged([{**rank, "cores": 64} for rank in said])
    assert {f.status for f in found.values()} <= {OK, "info"}
    assert "3" in found["PMI"].said
    assert said[0]["library"] in found["MPI of the ranks"].said


def test_ranks_that_are_alone_or_on_another_mpi_are_named(said: list[dict[str, Any]]) -> None:
    alone = judged([{**rank, "size": 1, "rank": 0} for rank in said])["PMI"]
    assert alone.status == BAD
    assert "3 ranks in worlds of [1]" in alone.said
    other = judged(said, version="Open MPI v5", family="Open MPI", host="far")["MPI of the ranks"]
    assert (other.status, other.where) == (BAD, "far")
    moved = judged(said, library="/other/libmpi.so.12", host="far")["MPI of the ranks"]
    assert (moved.status, moved.where) == (WARN, "far")
    wanted = judged(said, Expected("ours", (), "/vendor/libmpi.so.12"))["MPI of the ranks"]
    assert wanted.status == BAD
    assert "the site ours wants /vendor/libmpi.so.12" in wanted.said


def test_ranks_whose_threads_are_too_many_for_their_cores(said: list[dict[str, Any]]) -> None:
    assert judged(said, threads=1000)["threads of the ranks"].status == WARN


def test_ranks_on_another_network_than_the_sites(said: list[dict[str, Any]]) -> None:
    there = {"host": "far", "addresses": ["10.0.0.2"]}
    assert judged(said, **there)["network of the ranks"].status == OK
    slow = judged(said, Expected("ours", ("hsn*",)), **there)["network of the ranks"]
    assert slow.status == WARN
    assert "TCP over eth1" in slow.said
    fabric = Expected("ours", ("hsn*",), launcher="srun")
    assert judged(said, fabric, **there)["network of the ranks"].status == WARN
    on_it = judged(said, fabric, **there, fabrics=["cxi"])["network of the ranks"]
    assert on_it.status == OK
