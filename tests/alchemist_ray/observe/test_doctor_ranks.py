"""Findings about the ranks of a gang: of real ranks, and of altered reports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alchemist_ray.deploy.slurm.sites import Mpi, Nodes, Site
from alchemist_ray.observe.doctor import ranks
from alchemist_ray.observe.doctor.finding import BAD, NOTHING, OK, WARN, Finding
from tests.alchemist_ray.observe.test_doctor import expect
from tests.support import launches


@pytest.fixture(scope="module")
def message() -> list[dict[str, Any]]:
    """The reports of three real ranks."""
    return [json.loads(text) for text in launches.run("tests.ali.ranks_hpc:identities", 3)]


def judged(
    message: list[dict[str, Any]], site: Site = NOTHING, **of_the_last: Any
) -> dict[str, Finding]:
    """The findings by check, with something else in the last rank's mouth."""
    told = [*message[:-1], {**message[-1], **of_the_last}]
    return {f.check: f for f in ranks.judged(told, site, {"10.0.0.2": "eth1"})}


def test_sound_ranks_are_sound(message: list[dict[str, Any]]) -> None:
    found = judged([{**rank, "cores": 64} for rank in message])
    assert {f.status for f in found.values()} <= {OK, "info"}
    assert "3" in found["PMI"].message
    assert message[0]["library"] in found["MPI of the ranks"].message


def test_ranks_that_are_alone_or_on_another_mpi_are_named(message: list[dict[str, Any]]) -> None:
    alone = judged([{**rank, "size": 1, "rank": 0} for rank in message])["PMI"]
    expect(alone, BAD, "3 ranks in worlds of [1]")
    check = "MPI of the ranks"
    other = judged(message, version="Open MPI v5", family="Open MPI", host="far")[check]
    assert (other.status, other.node) == (BAD, "far")
    moved = judged(message, library="/other/libmpi.so.12", host="far")[check]
    assert (moved.status, moved.node) == (WARN, "far")
    ours = Site("ours", mpi=Mpi(library="/vendor/libmpi.so.12"))
    expect(judged(message, ours)[check], BAD, "the site ours requires /vendor/libmpi.so.12")


def test_ranks_whose_threads_are_too_many_for_their_cores(message: list[dict[str, Any]]) -> None:
    assert judged(message, threads=1000)["threads of the ranks"].status == WARN


def test_ranks_on_another_network_than_the_sites(message: list[dict[str, Any]]) -> None:
    there = {"host": "far", "addresses": ["10.0.0.2"]}
    check, nodes = "network of the ranks", Nodes(interface=("hsn*",))
    expect(judged(message, **there)[check], OK)
    expect(judged(message, Site("ours", nodes=nodes), **there)[check], WARN, "TCP over eth1")
    fabric = Site("ours", nodes=nodes, mpi=Mpi(launcher="srun"))
    expect(judged(message, fabric, **there)[check], WARN)
    expect(judged(message, fabric, **there, fabrics=["cxi"])[check], OK)
