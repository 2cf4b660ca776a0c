"""Runs on a host of `hosts.Hosts`: a user's process that calls functions on request."""

from __future__ import annotations

import contextlib
import importlib
import io
import ipaddress
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ali
from alchemist_ray import AlchemistSession, couple
from alchemist_ray.errors import AlchemistError, TransferError
from alchemist_ray.functions.submitted import SubmittedCall
from tests.support import traces

LIBRARY = Path(__file__).with_name("breaking.py")
KEPT = "kept"
MATRIX = np.arange(600.0).reshape(60, 10)
LAYOUTS = ("VC_STAR", "MC_MR", "STAR_VR", "STAR_STAR")

sessions: dict[str, AlchemistSession] = {}
libraries: dict[str, Any] = {}
submitted: list[SubmittedCall] = []


def join(nodes: int) -> int:
    """Join the cluster, wait for that many nodes, and return their number."""
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False)
    end = time.monotonic() + 30
    while (alive := sum(node["Alive"] for node in ray.nodes())) < nodes and time.monotonic() < end:
        time.sleep(0.1)
    return alive


def request(name: str, workers: int) -> list[dict[str, Any]]:
    """Start a gang in the session of this name; open the session if necessary."""
    if name not in sessions:
        sessions[name] = AlchemistSession()
    started = sessions[name].request_workers(workers)
    libraries[name] = sessions[name].load_library("breaking", LIBRARY)
    return [{"rank": w.rank, "host": w.hostname, "pid": w.pid} for w in started]


def workers(name: str) -> list[dict[str, Any]]:
    """The ranks of the gang, as `request` tells them."""
    found = sessions[name].list_workers()
    return [{"rank": w.rank, "host": w.hostname, "pid": w.pid} for w in found]


LARGE = np.arange(100_000.0).reshape(1000, 100)


def keep(name: str) -> None:
    """Send a matrix to the gang, under a name."""
    sessions[name].send_matrix(LARGE, name="kept")


def kept(name: str) -> bool:
    """Whether the gang has that matrix yet, also for its ranks."""
    A = sessions[name].matrix("kept")
    found = np.array_equal(A.fetch(), LARGE) and np.array_equal((A + 1).fetch(), LARGE + 1)
    A.free()
    return found


def pids(name: str) -> list[int]:
    """Ask the gang for the process ids of its ranks."""
    return [worker.pid for worker in sessions[name].list_workers()]


def total(name: str) -> int:
    """A sum over all ranks, by MPI."""
    return libraries[name].total()


def close(name: str) -> None:
    """Close the session of this name."""
    sessions.pop(name).close()


def round_trips(name: str) -> dict[str, Any]:
    """Send from here and fetch in several layouts; return which were unchanged, and the routes."""
    session = sessions[name]
    M = np.random.default_rng(1).standard_normal((501, 37))
    said = io.StringIO()
    equal = {}
    for layout in LAYOUTS:
        with contextlib.redirect_stdout(said):
            A = session.send_matrix(M, layout=layout, print_times=True)
        equal[layout] = bool(np.array_equal(A.fetch(), M)) and bool(
            np.array_equal(A.fetch(rows=slice(100, 300, 7), cols=5), M[100:300:7, 5:6])
        )
    return {"equal": equal, "times": said.getvalue()}


def large_round_trip(name: str, rows: int) -> dict[str, Any]:
    """The same with a matrix larger than any socket buffer."""
    M = np.random.default_rng(2).standard_normal((rows, 100))
    start = time.monotonic()
    A = sessions[name].send_matrix(M)
    sent = time.monotonic()
    equal = bool(np.array_equal(A.fetch(), M))
    A.free()
    return {"equal": equal, "send_s": sent - start, "fetch_s": time.monotonic() - sent}


def blocks(name: str) -> dict[str, Any]:
    """Send blocks that were put into the object stores of all nodes."""

    @ray.remote(num_cpus=0)
    def put(i: int, rows: int) -> list[Any]:
        return [ray.put(block(i, rows)), os.uname().nodename]

    rows = 5_000  # 800 kB: too large to be kept by its owner instead of a store
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    where = [NodeAffinitySchedulingStrategy(nodes[i % len(nodes)], soft=False) for i in range(4)]
    made = ray.get(
        [put.options(scheduling_strategy=w).remote(i, rows) for i, w in enumerate(where)]
    )
    A = sessions[name].send_matrix([(ref, i * rows, 0) for i, (ref, _) in enumerate(made)])
    expected = np.concatenate([block(i, rows) for i in range(4)])
    return {
        "hosts": sorted({host for _, host in made}),
        "equal": bool(np.array_equal(A.fetch(), expected)),
    }


def dask_blocks(name: str, host: str, count: int) -> dict[str, Any]:
    """Send a Dask array whose chunks are all in the object store of one host."""
    import dask.array as da  # noqa: PLC0415

    @ray.remote
    def put(first: int, last: int, rows: int) -> list[Any]:
        return [[ray.put(block(i, rows)) for i in range(first, last)], os.uname().nodename]

    rows = 1_000
    refs, where = ray.get(put.options(**task_on(host)).remote(0, count, rows))
    graph = {("chunks", i, 0): ref for i, ref in enumerate(refs)}
    array = da.Array(graph, "chunks", ((rows,) * count, (20,)), dtype="float64")
    before = connections_from(host, sessions[name])
    A = sessions[name].send_matrix(array)
    opened = connections_from(host, sessions[name]) - before
    expected = np.concatenate([block(i, rows) for i in range(count)])
    equal = bool(np.array_equal(A.fetch(), expected))
    return {"host": where, "equal": equal, "opened": len(opened)}


def task_on(host: str) -> dict[str, Any]:
    """The options of a task that runs on a host, given by its address, and needs no CPU."""
    (node,) = (n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == host)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return {"num_cpus": 0, "scheduling_strategy": strategy}


def connections_from(host: str, session: AlchemistSession) -> set[str]:
    """The TCP connections of a host to the data endpoints of a gang, also those just closed."""
    connection = session.connection
    assert connection is not None
    addresses = {where for node in connection.endpoints.nodes for where in node.addresses}

    @ray.remote
    def look() -> set[str]:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return {own for _, own, other, *_ in lines if _address(other) in addresses}

    return ray.get(look.options(**task_on(host)).remote())


def _address(text: str) -> str:
    """``tcp:10.77.0.1:80`` from ``01004D0A:0050`` of /proc/net/tcp."""
    host, _, port = text.partition(":")
    return f"tcp:{ipaddress.IPv4Address(bytes.fromhex(host)[::-1])}:{int(port, 16)}"


def block(i: int, rows: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).standard_normal((rows, 20))


def product(name: str) -> float:
    """A product computed across the hosts; its largest error."""
    session = sessions[name]
    rng = np.random.default_rng(3)
    A, B = rng.standard_normal((400, 300)), rng.standard_normal((300, 200))
    linalg = session.load_library("linalg")
    C = linalg.matmul(session.send_matrix(A), session.send_matrix(B))
    return float(np.abs(C.fetch() - A @ B).max())


def load_own_file(name: str) -> tuple[str, str]:
    """Load a library from a file that only this host has; the error."""
    with tempfile.NamedTemporaryFile(suffix=".py") as file:
        file.write(LIBRARY.read_bytes())
        file.flush()
        try:
            sessions[name].load_library("own", file.name)
        except AlchemistError as error:
            return type(error).__name__, str(error)
    return "none", "it was loaded"


def waited(name: str, path: str, fault: str, how: str) -> dict[str, Any]:
    """A call of `waiting.c` in which rank 1 has this fault while the others wait: how it ended."""
    library = sessions[name].load_library("waiting", path)
    start, kind = traces.clock(), "none"
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    if fault == "Ctrl-C":
        timer.start()
    try:
        library.wait.options(timeout_s=0.2 if fault == "limit" else None)(how, fault=fault)
    except (AlchemistError, KeyboardInterrupt) as error:
        kind = type(error).__name__
    finally:
        timer.cancel()
    return {"kind": kind, "seconds": traces.clock() - start}


def churn(name: str, seconds: float) -> str:
    """Compute in MPI across the hosts."""
    libraries[name].churn(seconds)
    return "done"


def run_function(name: str) -> int:
    """The ranks that a new function ran on: its file travels through Ray."""
    return sessions[name].run(lambda comm, salt: comm.size, time.monotonic_ns())


def until_lost(name: str, work: str) -> dict[str, Any]:
    """Repeat this work of a gang until it is lost: the error as JSON, with the time on the clock
    of all hosts."""
    M = np.ones((100_000, 100))
    call: Any = {
        "idle": lambda: (sessions[name].list_workers(), time.sleep(0.01)),
        "in MPI": lambda: libraries[name].churn(60.0),
        "sending": lambda: sessions[name].send_matrix(M).free(),
        "sent functions": lambda: run_function(name),
    }[work]
    while True:
        try:
            call()
        except AlchemistError as error:
            facts = {key: value for key, value in error.facts.items() if key != "tail"}
            told = {"kind": type(error).__name__, "message": str(error), "facts": facts}
            return {**told, "at": traces.clock()}


def keep_large(name: str) -> None:
    """Send a matrix of 160 MB to the gang, under the name A."""
    sessions[name].send_matrix(np.ones((200_000, 100)), name="A")


def until_broken(source: str, target: str) -> dict[str, Any]:
    """Send A from gang to gang until that fails: the error, and what the target has then."""
    A = sessions[source].matrix("A")
    while True:
        try:
            sessions[target].send_matrix(A).free()
        except AlchemistError as error:
            at = traces.clock()
            left = sessions[target if isinstance(error, TransferError) else source].list_matrices()
            told = {"kind": type(error).__name__, "message": str(error), "at": at}
            return {**told, "left": len(left)}


def _exchange(comm: Any, count: int) -> float:
    ctx = ali.context()
    channel = ctx.channel("interface")
    A, B = ctx.zeros((500, 300), "float64", "MC_MR"), ctx.zeros((500, 300), "float64")
    for k in range(count):
        A.local[...] = k
        channel.send(A)
        channel.receive(out=B)
        assert (B.local == k).all()
    return float(B.local[0, 0])


def _both(names: tuple[str, str], count: int) -> list[Any]:
    """Results or errors of a call of both gangs, with the time at which it ended."""

    def call(name: str) -> Any:
        try:
            return sessions[name].run(_exchange, count), "", traces.clock()
        except AlchemistError as error:
            return type(error).__name__, str(error), traces.clock()

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(call, names))


def exchanged(one: str, other: str) -> bool:
    """Couple two gangs, and exchange fields."""
    couple(sessions[one], sessions[other])
    return [result for result, _, _ in _both((one, other), 20)] == [19.0, 19.0]


def exchanges_until_lost(one: str, other: str) -> list[Any]:
    """Exchange fields until both calls have failed: the errors."""
    return _both((one, other), 10_000_000)


# --- a detached gang, which outlives the head and its program ---


def start_kept(cpus: int) -> list[int]:
    """Start a detached gang with a matrix and a library; the ids of its ranks."""
    join(1)
    als = sessions[KEPT] = AlchemistSession(cpus, name=KEPT, lifetime="detached")
    als.load_library("breaking", LIBRARY)
    als.send_matrix(MATRIX, name="A")
    return pids(KEPT)


def attach() -> list[int]:
    """Attach to that gang from this process; the ids of its ranks."""
    join(1)
    sessions[KEPT] = AlchemistSession.attach(KEPT)
    return pids(KEPT)


def works() -> dict[str, Any]:
    """A call over MPI, and whether the matrix is unchanged."""
    als = sessions[KEPT]
    equal = bool(np.array_equal(als.matrix("A").fetch(), MATRIX))
    return {"total": als.library("breaking").total(), "equal": equal}


def another(workers: int) -> int:
    """The total of a gang of another session."""
    with AlchemistSession(workers, start_timeout_s=60) as als:
        return als.load_library("breaking", LIBRARY).total()


def submit(count: int, go: str) -> None:
    """Submit calls to that gang, which wait until a file is there."""

    def shot(comm: Any, number: int) -> int:
        while not os.path.exists(go):
            time.sleep(0.01)
        return number

    submitted.extend(sessions[KEPT].submit(shot, number) for number in range(count))


def results(limit_s: float) -> list[Any]:
    """What the submitted calls return, or the names of their errors."""

    def result(future: SubmittedCall) -> Any:
        error = future.exception(limit_s)
        return future.result() if error is None else type(error).__name__

    return [result(future) for future in submitted or sessions[KEPT].futures()]


def gangs() -> list[str]:
    """The names of the gangs of the cluster."""
    join(1)
    return [gang.name for gang in AlchemistSession.list()]


def end() -> list[str]:
    """End the detached gang; the names of those that are left."""
    AlchemistSession.stop_gang(KEPT)
    return [gang.name for gang in AlchemistSession.list()]


def serve(nodes: int) -> dict[str, str]:
    """Start the gateway of a cluster of this many nodes; its address, and a token."""
    from alchemist_ray.gateway.server import actor  # noqa: PLC0415 - needs cryptography
    from alchemist_ray.gateway.server.access import TokenFile  # noqa: PLC0415

    assert join(nodes) == nodes
    folder = os.environ["HOME"] = tempfile.mkdtemp()  # for the certificate, too
    tokens = TokenFile(Path(folder, "tokens.json"))
    token = tokens.create("anna", ("call", "run_code"))
    info = actor.serve("0.0.0.0", 0, tokens=str(tokens.path), audit=str(Path(folder, "audit.log")))
    return {"address": info.address, "token": token}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed lines are not answers
    for line in sys.stdin:
        function, arguments = json.loads(line)
        module, name = function.split(":")
        try:
            answer = {"value": getattr(importlib.import_module(module), name)(*arguments)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    for session in sessions.values():
        session.close()


if __name__ == "__main__":
    sys.modules["tests.faults.inside"] = sys.modules["__main__"]  # one module, one state
    main()
