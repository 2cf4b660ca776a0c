"""``num_workers=(min, max)`` on a cluster that Ray's autoscaler makes larger and smaller."""

from __future__ import annotations

from tests.alchemist_ray.cluster.autoscaled import AutoscaledCluster
from tests.alchemist_ray.runtime.test_elastic import BEGIN, ran

# No CPUs are free for more ranks until a node comes. An idle node is taken away again.
PROGRAM = (
    BEGIN
    + """
from alchemist_ray.cluster.driver import find_driver
ray.init(address=sys.argv[1], log_to_driver=False)

def agents(driver):
    return list(driver._agents.values())

def idle_soon(agent):
    sys.modules["alchemist_ray.cluster.agent"].IDLE_S = 1.0

def alive():
    return sum(node["Alive"] for node in ray.nodes())

told = {"nodes": [alive()]}
with AlchemistSession((1, 4)) as als:
    A = als.send_matrix(X, layout="MC_MR")
    sizes = [len(als.list_workers())]
    until(lambda: len(als.list_workers()) == 4)
    sizes.append(len(als.list_workers()))
    told["nodes"].append(alive())
    assert np.array_equal(A.fetch(), X)
    als.resize(1)
    free(3)
    assert np.array_equal(A.fetch(), X)
    sizes.append(len(als.list_workers()))
# On one machine an agent sees the ranks of all nodes: it ends when there are none, after 30 s.
for agent in ray.get(find_driver().__ray_call__.remote(agents)):
    ray.get(agent.__ray_call__.remote(idle_soon))
until(lambda: alive() == 1)
told["nodes"].append(alive())
told["sizes"] = sizes
print(json.dumps(told))
"""
)


def test_a_gang_grows_and_shrinks_with_an_autoscaled_cluster() -> None:
    with AutoscaledCluster(head_cpus=2, nodes=1, node_cpus=2, idle_minutes=0.1) as cluster:
        told = ran(PROGRAM, cluster.address, **cluster.environment)
    assert told == {"sizes": [2, 4, 1], "nodes": [1, 2, 1]}
