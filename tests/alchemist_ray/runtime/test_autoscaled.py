"""``num_workers=(min, max)`` on a cluster that Ray's autoscaler makes larger and smaller."""

from __future__ import annotations

import pytest

from tests.alchemist_ray.runtime.autoscaled import AutoscaledCluster
from tests.alchemist_ray.runtime.test_elastic import BEGIN, ran

# No CPUs are free for more ranks until a node comes. An idle node is taken away again.
PROGRAM = (
    BEGIN
    + """
ray.init(address=sys.argv[1], log_to_driver=False)

def nodes():
    return sum(node["Alive"] for node in ray.nodes())

told = {"nodes": [nodes()]}
with AlchemistSession((1, 4)) as als:
    A = als.send_matrix(X, layout="MC_MR")
    sizes = [len(als.list_workers())]
    until(lambda: len(als.list_workers()) == 4)
    sizes.append(len(als.list_workers()))
    told["nodes"].append(nodes())
    assert np.array_equal(A.fetch(), X)
    als.resize(1)
    until(lambda: ray.available_resources().get("CPU") == 3)
    assert np.array_equal(A.fetch(), X)
    sizes.append(len(als.list_workers()))
# On one machine an agent sees the ranks of all nodes: it ends when there are none.
until(lambda: nodes() == 1)
told["nodes"].append(nodes())
told["sizes"] = sizes
print(json.dumps(told))
"""
)


@pytest.mark.timeout(300)
def test_a_gang_grows_and_shrinks_with_an_autoscaled_cluster() -> None:
    with AutoscaledCluster(head_cpus=2, nodes=1, node_cpus=2, idle_minutes=0.1) as cluster:
        told = ran(PROGRAM, cluster.address, **cluster.environment)
    assert told == {"sizes": [2, 4, 1], "nodes": [1, 2, 1]}
