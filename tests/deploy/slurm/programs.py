"""Programs of users in jobs: ``python -m tests.deploy.slurm.programs NAME ...``.

They tell what they have found in lines ``TOLD name JSON`` of the job's log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from alchemist_ray import AlchemistError, AlchemistSession


def tell(name: str, value: Any) -> None:
    print(f"TOLD {name} {json.dumps(value)}", flush=True)


def mode(path: str) -> str:
    return oct(Path(path).stat().st_mode & 0o777)


def multiply(als: AlchemistSession) -> float:
    """The largest error of a product that the gang has computed."""
    rng = np.random.default_rng(0)
    a, b = rng.random((300, 120)), rng.random((120, 200))
    product = als.load_library("linalg").matmul(als.send_matrix(a), als.send_matrix(b))
    return float(np.abs(product.fetch() - a @ b).max())


def workers(als: AlchemistSession) -> list[list[Any]]:
    return [[w.rank, w.hostname, w.address.split(":")[1]] for w in als.list_workers()]


def failure(work: Any) -> dict[str, Any]:
    """The error of the tree that some work ends with, and after how long."""
    begin = time.monotonic()
    try:
        work()
    except AlchemistError as error:
        seconds = time.monotonic() - begin
        return {"kind": type(error).__name__, "message": str(error), "seconds": seconds}
    return {"kind": "none", "message": "", "seconds": time.monotonic() - begin}


def everything() -> int:
    """A gang by our own launcher, by srun, and by srun as it should not be."""
    tell("job", {
        "token": mode(os.environ["RAY_AUTH_TOKEN_PATH"]),
        "auth": os.environ["RAY_AUTH_MODE"],
        "folder": mode(os.environ["ALCHEMIST_JOB_FOLDER"]),
    })  # fmt: skip
    with AlchemistSession(6) as als:
        tell("pmi", {"workers": workers(als), "error": multiply(als)})
        tell("too-few", failure(lambda: AlchemistSession(7)))
    with AlchemistSession(4, launcher="srun", env={"OF_RANKS": "given"}) as als:
        steps = als.run(lambda comm: [comm.size, os.environ.get("SLURM_STEP_ID")])
        shared = als.run(lambda comm: comm.Split_type(1).size)
        tell("srun", {"workers": workers(als), "error": multiply(als), "step": steps})
        tell("sharing", shared)
        tell("env", als.run(lambda comm: comm.allgather(os.environ.get("OF_RANKS"))))
        tell("raised", failure(lambda: als.run(lambda comm: 1 // comm.rank)))
        tell("goes-on", als.run(lambda comm: comm.allreduce(comm.rank)))
        tell("killed", crash(als))
        als.yield_workers()
        als.request_workers(3)
        tell("again", {"workers": workers(als), "error": multiply(als)})
        tell("killed-again", crash(als))
    os.environ["ALCHEMIST_SRUN_MPI"] = "none"
    tell("wrong", failure(lambda: AlchemistSession(2, launcher="srun", start_timeout_s=60)))
    return 7


def crash(als: AlchemistSession) -> dict[str, Any]:
    """The last rank is killed, on another node than the first one: what the gang has then."""
    data = np.random.default_rng(1).random((500, 30))
    A, steps = als.send_matrix(data), als.run(lambda comm: os.environ.get("SLURM_STEP_ID"))
    told = failure(lambda: als.run(_kill_last))
    begin = time.monotonic()
    total = als.run(lambda comm: comm.allreduce(1))
    told["renewed_s"] = time.monotonic() - begin
    told["ranks"] = total
    told["kept"] = bool(np.array_equal(A.fetch(), data)) and multiply(als) < 1e-12
    told["another step"] = als.run(lambda comm: os.environ.get("SLURM_STEP_ID")) != steps
    return told


def _kill_last(comm: Any) -> None:
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def save(workers: str = "1", launcher: str = "auto") -> int:
    """Told to end by SIGTERM, it saves what it has and leaves with its own code."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(5)

    with AlchemistSession(int(workers), launcher=launcher) as als:
        signal.signal(signal.SIGTERM, leave)  # only now: Ray sets its own when it is joined
        A = als.send_matrix(np.arange(6.0).reshape(2, 3))
        tell("address", os.environ["RAY_ADDRESS"])
        try:
            time.sleep(600)
        finally:
            time.sleep(1)  # Slurm has signalled all processes of the job
            tell("ranks", als.run(lambda comm: comm.allreduce(1)))
            tell("saved", A.fetch().tolist())
    return 0


def ignore() -> int:
    """Told to end by SIGTERM, it goes on."""
    with AlchemistSession(1):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell("address", os.environ["RAY_ADDRESS"])
        time.sleep(600)
    return 0


def gpus() -> int:
    """The devices that each rank sees, by our own launcher and by srun."""

    def seen(comm: Any) -> list[Any]:
        device = os.environ.get("CUDA_VISIBLE_DEVICES")
        return comm.gather((os.uname().nodename, device))  # type: ignore[no-any-return]

    for launcher in ("pmi", "srun"):
        with AlchemistSession(4, gpus_per_worker=1, launcher=launcher) as als:
            tell(launcher, als.run(seen))
    tell("too-many", failure(lambda: AlchemistSession(5, gpus_per_worker=1, start_timeout_s=5)))
    return 0


def count() -> int:
    """Counts the signals that tell it to end, for a second after the first."""
    numbers: list[int] = []
    with AlchemistSession(1):
        signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
        tell("address", os.environ["RAY_ADDRESS"])
        while not numbers:
            time.sleep(0.05)
        time.sleep(1)
        tell("signals", len(numbers))
    return 6


def stay(path: str) -> int:
    """Goes on until a file is there."""
    with AlchemistSession(1) as als:
        tell("address", os.environ["RAY_ADDRESS"])
        while not Path(path).exists():
            time.sleep(0.1)
        tell("error", multiply(als))
    return 7


def found(*argv: str) -> int:
    """Finds the job's Ray by itself, and by its address as well."""
    import ray  # noqa: PLC0415

    tell("given", [name for name in os.environ if name.startswith("RAY_A")])
    with AlchemistSession(2) as als:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        als.connect_to_alchemist(host, int(port))
        tell("found", {"host": os.uname().nodename, "nodes": len(ray.nodes()), "argv": argv})
        tell("error", multiply(als))
    return 3


def transfer() -> int:
    """Sends matrices, one after the other."""
    data = np.random.default_rng(0).random((4000, 2000))
    with AlchemistSession(4, launcher="srun") as als:
        tell("workers", workers(als))
        while True:
            als.send_matrix(data).free()
            tell("sent", True)


def vanish() -> int:
    """A gang over all nodes loses one of them; the next does without it."""
    with AlchemistSession(6) as als:
        tell("workers", workers(als))
        lost = failure(lambda: als.run(lambda comm: time.sleep(300)))
        tell("lost", lost)
        told = ""
        for _ in range(100):
            again = failure(lambda: als.request_workers(2))
            told = again["message"]
            if again["kind"] == "none":
                break
            time.sleep(1)
        tell("again", {"workers": workers(als), "error": multiply(als), "said": told})
    return 0


def spark() -> int:
    """Sends from Spark's executors on this node to ranks on the nodes of another job, and back."""
    from tests.support.sparks import Sparks  # noqa: PLC0415

    started = Sparks()
    rows = 20_000
    expected = np.arange(rows)[:, None] * [1.0, 0.5] + [0.0, 3.0]
    session = started.executors()
    frame = session.range(0, rows, 1, 4).selectExpr("double(id) x", "id * 0.5 + 3 y").cache()
    names = session.sparkContext.range(4, numSlices=4).map(lambda _: os.uname().nodename).collect()
    tell("executors", sorted(set(names)))
    for size, strategy in ((1, "STRICT_PACK"), (2, "STRICT_PACK"), (2, "STRICT_SPREAD")):
        with AlchemistSession(size, strategy=strategy, progress=False) as als:
            hosts = sorted({host for _, host, _ in workers(als)})
            A = als.send_matrix(frame)
            begin = time.monotonic()
            B = als.send_matrix(frame)
            seconds = time.monotonic() - begin
            same = np.array_equal(A.fetch(), expected) and np.array_equal(B.fetch(), expected)
            back = B.to_spark(session).selectExpr("sum(x)", "sum(y)").first()
            sums = np.allclose(list(back), expected.sum(axis=0))
            tell(f"{strategy}-{size}", [hosts, bool(same and sums), seconds])
    started.stop()
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](*sys.argv[2:]))
