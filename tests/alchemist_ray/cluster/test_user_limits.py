"""Advisory quotas inside a cluster: the Driver refuses gangs and ranks beyond them."""

from __future__ import annotations

import pytest

from alchemist_ray.cluster.user_limits import (
    BYTES_VARIABLE,
    GANGS_VARIABLE,
    RANKS_VARIABLE,
    ClusterLimits,
)
from alchemist_ray.errors import ResourceError
from tests.alchemist_ray.runtime.test_elastic import BEGIN, ran

PROGRAM = (
    BEGIN
    + """
ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False,
         object_store_memory=80 << 20)
told = {}

def refused(what, action):
    try:
        action()
    except ResourceError as error:
        told[what] = str(error)

with AlchemistSession(2) as first:
    refused("ranks", lambda: AlchemistSession(2))
    with AlchemistSession(1):
        refused("gangs", lambda: AlchemistSession(1))
        refused("resize", lambda: first.resize(3))
    first.resize(3)
    first.resize(1)
    with AlchemistSession(2):
        told["after"] = len(first.list_workers())
X = np.ones((500, 500))  # 2 MB
with AlchemistSession(1) as first, AlchemistSession(1) as second:
    A = first.send_matrix(X)
    time.sleep(2.5)  # the gangs learn of each other
    B = second.send_matrix(X)
    refused("bytes", lambda: second.send_matrix(X))
    refused("layout", lambda: B.to_layout("MC_MR"))
    del A
    time.sleep(2.5)
    C = second.send_matrix(X)
    refused("result", lambda: (B + C).computed())
    told["norm"] = float(np.linalg.norm(C))  # makes no matrix
    del C
    told["freed"] = float((B + 1).fetch().sum())
print(json.dumps(told))
"""
)


def test_a_cluster_refuses_gangs_and_ranks_beyond_its_limits() -> None:
    told = ran(PROGRAM, **{GANGS_VARIABLE: "2", RANKS_VARIABLE: "3", BYTES_VARIABLE: "4500000"})
    assert "would have 4 ranks, more than the quota of this cluster, 3: end a gang" in told["ranks"]
    assert "would have 3 gangs, more than the quota of this cluster, 2" in told["gangs"]
    assert "goes on with its 2 workers: " in told["resize"]
    assert "would have 4 ranks" in told["resize"]
    assert told["after"] == 1
    for what, room in (("bytes", "500.0 kB"), ("layout", "500.0 kB"), ("result", "500.0 kB")):
        words = f"2.0 MB more are asked for; the quota of this gang's user leaves {room}: free"
        assert words in told[what], told
    assert told["norm"] == 500
    assert told["freed"] == 2 * 500**2


def test_limits_count_by_user_and_forget_what_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = ClusterLimits()
    limits.add("anna", "g1", "r1", 100, instead=False)  # no limit is set
    monkeypatch.setenv(RANKS_VARIABLE, "8")
    with pytest.raises(ResourceError, match="anna would have 101 ranks"):
        limits.add("anna", "g1", "r2", 1, instead=False)
    limits.add("anna", "g1", "r3", 3, instead=True)
    limits.remove("r1")
    limits.add("anna", "g2", "r4", 5, instead=False)
    limits.add("ben", "g3", "r5", 8, instead=False)
    monkeypatch.setenv(GANGS_VARIABLE, "1")
    with pytest.raises(ResourceError, match="ben would have 2 gangs"):
        limits.add("ben", "g4", "r6", 0, instead=False)
    limits.add("ben", "g3", "r6", 0, instead=False)  # the same gang
    assert limits.share("anna", "g1", 700) is None
    monkeypatch.setenv(BYTES_VARIABLE, "1000")
    assert limits.share("anna", "g2", 200) == 300
    assert limits.share("ben", "g3", 900) == 1000
    limits.remove("r3")
    assert limits.share("anna", "g2", 200) == 1000  # g1 has ended
    monkeypatch.setenv(RANKS_VARIABLE, "many")
    with pytest.raises(ResourceError, match="ALCHEMIST_USER_RANKS='many'"):
        limits.add("carl", "g5", "r7", 1, instead=False)
