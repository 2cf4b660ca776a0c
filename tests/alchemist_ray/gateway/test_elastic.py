"""Gangs that grow by themselves, started through a gateway, and the quota of ranks."""

from __future__ import annotations

from pathlib import Path

from tests.alchemist_ray.runtime.test_elastic import BEGIN
from tests.support import commands

LIMIT_S = 280

# On a cluster of its own: gangs of other tests would take the free CPUs, or leave some.
PROGRAM = (
    BEGIN
    + """
from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.access import TokenFile

def refused(workers, words):
    try:
        AlchemistSession(workers, **there)
    except ResourceError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{workers} were started")

def has(count):
    until(lambda: len(als.list_workers()) == count)
    assert np.array_equal(A.fetch(), X)
    assert np.array_equal(als.send_matrix(X, layout="STAR_VC").fetch(), X)

folder = os.environ["HOME"] = sys.argv[1]
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
tokens = TokenFile(f"{folder}/tokens.json")
token = tokens.create("anna", ("call",), ranks=4)
info = actor.serve("127.0.0.1", 0, tokens=str(tokens.path), audit=f"{folder}/audit.log")
there = {"address": info.address, "token": token}
X = np.random.default_rng(0).random((4001, 301))
with AlchemistSession(2):  # other work in the cluster
    refused((1, 5), "5 ranks")
    refused((3, 2), "fewest")
    free(2)
    als = AlchemistSession((1, 4), **there)
    assert len(als.list_workers()) == 2
    A = als.send_matrix(X, layout="MC_MR")
    refused(1, "5 ranks")  # it may become 4 at any time
has(4)
als.resize(2)
has(2)
free(2)
with AlchemistSession((1, 2), **there) as other:  # the first does not grow any more
    assert len(other.list_workers()) == 2
    refused(1, "5 ranks")
als.stop()
free(4)
info.stop()
print("done")
"""
)


def test_an_elastic_gang_counts_with_its_most_ranks_until_it_is_resized(tmp_path: Path) -> None:
    done = commands.python(PROGRAM, tmp_path, code=0, limit_s=LIMIT_S)
    assert done.stdout.endswith("done\n")
