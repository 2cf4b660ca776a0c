"""Ranks of a gang share the bundles of a placement group: one per node, if the CPUs are free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray.cluster import placement
from tests.alchemist_ray.runtime.test_elastic import BEGIN, ran

ROOMS = st.lists(st.integers(0, 200), min_size=1, max_size=80)

# Nodes of 4, 2 and 1 CPUs on this machine.
NODES = (
    BEGIN
    + """
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

def bundles(group):
    return sorted(one["CPU"] for one in group["bundles"].values())

def gang(name, workers, strategy="PACK", cpus=1.0):
    with AlchemistSession(workers, strategy=strategy, cpus_per_worker=cpus) as als:
        nodes = [cpus_of[w.node_id] for w in als.list_workers()]
        groups = ray.util.placement_group_table().values()
        created = [bundles(group) for group in groups if group["state"] == "CREATED"]
        told[name] = nodes, created

@ray.remote
class Busy:
    pass

told = {}
with nodes(4, 2, 1):
    cpus_of = {node["NodeID"]: int(node["Resources"]["CPU"]) for node in ray.nodes()}
    gang("packed", 6)
    free(7)
    gang("spread", 4, "SPREAD")
    free(7)
    gang("fractions", 7, cpus=0.7)
    free(7)
    largest = next(node for node, cpus in cpus_of.items() if cpus == 4)
    there = NodeAffinitySchedulingStrategy(largest, soft=False)
    busy = Busy.options(num_cpus=3, scheduling_strategy=there).remote()
    ray.get(busy.__ray_ready__.remote())
    free(4)
    gang("beside others", 4)
    ray.kill(busy)
    free(7)
    # Each plans for the CPUs that are free, and others take them first.
    racing = [threading.Thread(target=gang, args=(f"race {n}", n)) for n in (1, 2, 4)]
    for one in racing:
        one.start()
    for one in racing:
        one.join()
    print(json.dumps(told))
"""
)


def test_a_gang_has_a_bundle_per_node() -> None:
    told = ran(NODES)
    assert told["packed"] == [[4, 4, 4, 4, 2, 2], [[2.0, 4.0]]]
    assert sorted(told["spread"][0]) in ([1, 2, 2, 4], [1, 2, 4, 4])
    assert told["spread"][1] == [[1.0, 1.0, 2.0]]
    assert told["fractions"] == [[4, 4, 4, 4, 4, 2, 2], [[1.4, 3.5]]]
    assert told["beside others"][1] == [[1.0, 1.0, 2.0]]
    assert {len(told[f"race {ranks}"][0]) for ranks in (1, 2, 4)} == {1, 2, 4}


@given(ROOMS, st.integers(1, 20000), st.sampled_from(["PACK", "SPREAD"]))
def test_the_bundles_of_nodes_fit_on_them(rooms: list[int], workers: int, strategy: str) -> None:
    shares = placement.per_node(workers, strategy, rooms)
    if workers > sum(rooms):
        assert shares == []
        return
    assert sum(shares) == workers
    largest = sorted(rooms, reverse=True)
    assert all(share <= here for share, here in zip(shares, largest, strict=False))
    if strategy == "PACK":
        assert sum(largest[: len(shares) - 1]) < workers  # on no fewer nodes
    else:
        assert len(shares) == min(workers, sum(here > 0 for here in rooms))
        assert shares[0] - shares[-1] <= 1 or shares[-1] in rooms  # that node is full


@given(ROOMS, st.integers(1, 20000), st.sampled_from(["PACK", "SPREAD"]))
def test_bundles_that_wait_are_small_and_few(rooms: list[int], workers: int, strategy: str) -> None:
    pieces = placement.in_pieces(workers, strategy, rooms)
    assert sum(pieces) == workers
    assert max(pieces) <= -(-workers // placement.MOST_WAITING)
    assert len(pieces) <= placement.MOST_WAITING + len(rooms)
