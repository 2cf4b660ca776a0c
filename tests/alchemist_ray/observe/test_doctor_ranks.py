"""Findings about the ranks of a gang: of real ranks, and of altered reports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alchemist_ray.deploy.slurm.sites import Mpi, Nodes, Site
from alchemist_ray.observe.doctor import ranks
from alchemist_ray.observe.doctor.finding import BAD, NOTHING, OK, WARN, Finding
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
    assert alone.status == BAD
    assert "3 ranks in worlds of [1]" in alone.message
    other = judged(message, version="Open MPI v5", family="Open MPI", host="far")[
        "MPI of the ranks"
    ]
    assert (other.status, other.node) == (BAD, "far")
    moved = judged(message, library="/other/libmpi.so.12", host="far")["MPI of the ranks"]
    assert (moved.status, moved.node) == (WARN, "far")
    wanted = judged(message, Site("ours", mpi=Mpi(library="/vendor/libmpi.so.12")))[
        "MPI of the ranks"
    ]
    assert wanted.status == BAD
    assert "the site ours requires /vendor/libmpi.so.12" in wanted.message


def test_ranks_whose_threads_are_too_many_for_their_cores(message: list[dict[str, Any]]) -> None:
    assert judged(message, threads=1000)["threads of the ranks"].status == WARN


def test_ranks_on_another_network_than_the_sites(message: list[dict[str, Any]]) -> None:
    there = {"host": "far", "addresses": ["10.0.0.2"]}
    assert judged(message, **there)["network of the ranks"].status == OK
    slow = judged(message, Site("ours", nodes=Nodes(interface=("hsn*",))), **there)[
        "network of the ranks"
    ]
    assert slow.status == WARN
    assert "TCP over eth1" in slow.message
    fabric = Site("ours", nodes=Nodes(interface=("hsn*",)), mpi=Mpi(launcher="srun"))
    assert judged(message, fabric, **there)["network of the ranks"].status == WARN
    on_it = judged(message, fabric, **there, fabrics=["cxi"])["network of the ranks"]
    assert on_it.status == OK
