"""GPUs of ranks: reserved by Ray, seen by the ranks. Ray counts logical GPUs; no card is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray.attached.options import RankResources
from alchemist_ray.cluster.placement import divided
from alchemist_ray.errors import ResourceError
from tests.support import commands

PROGRAM = """
    import json, time
    import ray

    ray.init(num_cpus=6, num_gpus=4, log_to_driver=False, include_dashboard=False)
    from alchemist_ray import AlchemistSession, mpi_function
    from alchemist_ray.errors import ResourceError

    def seen(comm):
        import os
        return comm.gather(os.environ.get("CUDA_VISIBLE_DEVICES"))

    def refusal(workers, **options):
        try:
            AlchemistSession(workers, **options)
        except ResourceError as error:
            return str(error)

    def free():
        end = time.monotonic() + 20
        while ray.available_resources().get("GPU") != 4 and time.monotonic() < end:
            time.sleep(0.05)
        return ray.available_resources().get("GPU")

    told = {}
    with AlchemistSession(2, gpus_per_worker=1, max_failures=1) as als:
        told["one each"] = als.run(seen)
        told["workers"] = [worker.gpus for worker in als.list_workers()]
        told["left"] = ray.available_resources().get("GPU")
        told["not free"] = refusal(1, gpus_per_worker=3, start_timeout_s=3)
        als.resize(3)
        told["grown"] = als.run(seen)
        als.resize(1)
        told["shrunk"] = als.run(seen)
        try:
            als.run(lambda comm: __import__("os").kill(__import__("os").getpid(), 9))
        except Exception as error:
            told["lost"] = type(error).__name__
        told["recovered"] = als.run(seen)
    told["given back"] = free()
    with AlchemistSession(4, gpus_per_worker=0.5) as als:
        told["halves"] = als.run(seen)
    free()
    with AlchemistSession(1, gpus_per_worker=2) as als:
        told["two"] = als.run(seen)
    free()
    with AlchemistSession(1) as als:
        told["none"] = als.run(seen)
    told["too many"] = refusal(1, gpus_per_worker=5)

    @ray.remote(num_cpus=2, num_gpus=2)
    def inner(each):
        with AlchemistSession(2, gpus_per_worker=each, placement="inherit") as als:
            return als.run(seen)

    told["inherited"] = ray.get(inner.remote(1))
    try:
        ray.get(inner.remote(2))
    except ResourceError as error:
        told["inherited too many"] = str(error.cause)

    @mpi_function(num_workers=2, gpus_per_worker=1)
    def function(comm):
        return seen(comm)

    told["function"] = ray.get(function.remote())
    print(json.dumps(told))
"""


def test_ranks_see_the_gpus_that_ray_has_reserved_for_them() -> None:
    told = json.loads(commands.python(PROGRAM, code=0, limit_s=140.0).stdout.splitlines()[-1])
    one, other = told["one each"]
    assert one != other
    assert {one, other} <= {"0", "1", "2", "3"}
    assert told["workers"] == [one, other]
    assert told["left"] == 2
    assert "not enough free GPUs for 1 worker of 1 CPU and 3 GPUs after 3 s" in told["not free"]
    assert "free now: 4 CPUs and 2 GPUs. In use: gang g" in told["not free"]
    assert told["grown"][:2] == [one, other]
    assert len(set(told["grown"])) == 3
    assert told["shrunk"] == [one]
    assert told["lost"] == "GroupRecoveredError"
    assert told["recovered"] == [one]
    assert told["given back"] == 4
    assert sorted(told["halves"]) == sorted([told["halves"][0], told["halves"][2]] * 2)
    assert len(set(told["halves"])) == 2
    assert len(set(told["two"][0].split(","))) == 2
    assert told["none"] == [None]
    assert (
        "1 worker of 1 CPU and 5 GPUs do not fit: the cluster has 6 CPUs and 4 GPUs"
        in (told["too many"])
    )
    assert len(set(told["inherited"])) == 2
    assert "needs 2 and 4: give it num_cpus=2, num_gpus=4 or more" in told["inherited too many"]
    assert len(set(told["function"])) == 2


ON_DEVICE = """
    import json
    import numpy as np
    import ray

    ray.init(num_cpus=4, num_gpus=2, log_to_driver=False, include_dashboard=False)
    from alchemist_ray import AlchemistSession
    from alchemist_ray.errors import AlchemistError

    def refusal(call, *args):
        try:
            call(*args)
        except AlchemistError as error:
            return str(error)

    def use_cpu(comm):  # in place of a GPU
        from mpi_workers.matrix import device
        told = device.current().products
        device.use(device.Device("cpu", products=told))
        return comm.gather(told)

    def total(comm, A):
        return comm.allreduce(float(A.on_device().sum()))

    def doubled(comm, A):
        with A.changed_on_device() as x:
            x *= 2

    def lost(comm):
        import sys, types

        class Cuda:
            is_initialized = staticmethod(lambda: True)

            def synchronize():
                raise RuntimeError("CUDA error: unspecified launch failure")

        if comm.rank:
            sys.modules["torch"] = types.SimpleNamespace(cuda=Cuda)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        comm.barrier()

    told = {}
    with AlchemistSession(2, gpus_per_worker=1, gpu="off") as als:
        told["off"] = als.run(use_cpu)
    with AlchemistSession(2, gpus_per_worker=1) as als:
        A = als.send_matrix(np.ones((1000, 10)))
        told["no driver"] = refusal(als.run, total, A)
        told["auto"] = als.run(use_cpu)
        copied = []
        for call, pure in ((total, True), (total, True), (doubled, False), (total, True)):
            with als.profile() as profile:
                told["sum"] = als.run(call, A, pure=pure)
            copied.append([sum(e.device_nbytes for e in one.entries) for one in profile.ranks])
        told["copied"], told["profile"] = copied, str(profile)
        try:
            als.run(lost)
        except Exception as error:
            told["lost"] = str(error)
    with AlchemistSession(1) as als:
        told["none"] = refusal(als.run, total, als.send_matrix(np.ones((3, 3))))
    print(json.dumps(told))
"""


def test_parts_cross_to_gpus_and_their_copies_are_kept_and_shown() -> None:
    pytest.importorskip("torch", reason="needs torch")
    told = json.loads(commands.python(ON_DEVICE, code=0, limit_s=140.0).stdout.splitlines()[-1])
    assert told["off"] == [False, False]
    assert told["auto"] == [True, True]
    assert "cannot use this rank's GPU: RuntimeError: " in told["no driver"]
    part = 500 * 10 * 8
    # Copied once, kept; there and back; copied again, because it had been changed.
    assert told["copied"] == [[part] * 2, [0] * 2, [2 * part] * 2, [part] * 2]
    assert told["sum"] == 20_000
    assert "to/from GPU" in told["profile"].splitlines()[0]
    assert told["profile"].splitlines()[2].endswith("40.0 kB")
    assert "has lost its GPU: RuntimeError: CUDA error: an illegal memory access" in told["lost"]
    assert "no GPU is reserved for this rank: start the gang with gpus_per_worker=1" in told["none"]


@given(st.integers(1, 20), st.sampled_from([0.1, 0.25, 0.5, 1, 2, 3]))
def test_every_rank_has_as_many_devices_as_were_reserved(ranks: int, gpus: float) -> None:
    ids = [str(i) for i in range(-(-ranks * gpus // 1).__trunc__())]
    found = divided({"CUDA_VISIBLE_DEVICES": ",".join(ids)}, ranks, gpus)
    used = [one["CUDA_VISIBLE_DEVICES"].split(",") for one in found]
    assert all(len(mine) == max(1, gpus) for mine in used)
    shared = [device for mine in used for device in mine]
    assert max(shared.count(device) for device in ids if device in shared) <= max(1, 1 / gpus)


@pytest.mark.parametrize("seen", [{}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_devices_that_ray_does_not_name_are_an_error(seen: Mapping[str, str]) -> None:
    with pytest.raises(ResourceError, match="2 ranks with 1 GPUs each were reserved, and Ray has"):
        divided(seen, 2, 1)


def test_a_rank_needs_all_of_its_resources() -> None:
    each = RankResources(2.0, 0.5)
    assert each.room({"CPU": 7, "GPU": 4}) == 3
    assert each.room({"CPU": 100, "GPU": 4}) == 8
    assert each.room({"CPU": 100}) == 0
    assert RankResources(0.1).room({"CPU": 0.3}) == 3
    assert str(each) == "2 CPUs and 0.5 GPUs"
