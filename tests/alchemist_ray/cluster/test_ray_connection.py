"""Programs that leave Ray and join the same cluster again, and programs that fork."""

from __future__ import annotations

from tests.support import commands

LIMIT_S = 100.0

# What is used before `ray.shutdown()` is remembered in the process, and must not be used after it.
AGAIN = """
import sys
import ray
from alchemist_ray import AlchemistSession, mpi_function
from alchemist_ray.transfer.object_store import agent_of

@mpi_function(num_workers=1)
def size(comm):
    return comm.size

def join():
    ray.init(address=sys.argv[1], log_to_driver=False)

join()
old = AlchemistSession(1)
for _ in range(2):
    with AlchemistSession(2) as als:
        assert als.run(lambda comm: comm.size) == 2
    node = ray.get_runtime_context().get_node_id()
    assert ray.get(agent_of(node).ready.remote())
    assert ray.get(size.remote()) == 1
    ray.shutdown()
    join()
old.request_workers(1)
assert old.run(lambda comm: comm.size) == 1
old.close()
print("done")
"""
# A forked child collects garbage of its parent, drops references that its parent holds, and calls
# Ray, which cannot answer there.
FORK = """
import gc, multiprocessing, os, sys, threading
import numpy as np
import ray
from alchemist_ray import AlchemistSession
from alchemist_ray.errors import SessionError

ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0)
class Actor:
    def pid(self):
        return os.getpid()

als, idle = AlchemistSession(1), AlchemistSession()
handle = als.send_matrix(np.eye(3))
gc.disable()
garbage = [Actor.remote() for _ in range(3)]
ray.get([actor.pid.remote() for actor in garbage])
garbage += [ray.put(1), garbage]
last, held = Actor.remote(), ray.put(2)
ray.get(last.pid.remote())
del garbage

def child():
    global last, held
    del last, held
    gc.collect()
    assert handle.fetch().sum() == 3
    assert als.run(lambda comm: 1) == 1  # needs no Ray
    for call in (AlchemistSession, AlchemistSession.list, Actor.remote, ray.nodes,
                 lambda: idle.request_workers(1)):
        try:
            call()
        except SessionError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError(call)

started = multiprocessing.get_context("fork").Process(target=child)
started.start()
started.join(20)
assert started.exitcode == 0, started.exitcode
threading.Timer(20, os._exit, [1]).start()  # calls of Ray may wait without end
assert ray.nodes()
assert ray.get([last.pid.remote(), held])[1] == 2
assert ray.get(Actor.remote().pid.remote())
assert als.run(lambda comm: comm.size) == 1
als.close(), idle.close()
print("done", flush=True)
os._exit(0)
"""

# The thread that looks after the calls finds Ray in the middle of its end.
SHUTDOWN = """
import sys, time
import ray
from alchemist_ray import mpi_function
from alchemist_ray.ray_access import mpi_function as functions

functions.POLL_INTERVAL_S = 0.03

@mpi_function(num_workers=1)
def wait(comm, seconds):
    time.sleep(seconds)

ray.init(address=sys.argv[1], log_to_driver=False)
ray.get(wait.remote(0.0))
wait.remote(60.0)
ray.shutdown()
print("done")
"""


def runs(program: str, cluster: str) -> None:
    done = commands.python(program, cluster, limit_s=LIMIT_S)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr


def test_a_program_joins_a_cluster_again(cluster: str) -> None:
    runs(AGAIN, cluster)


def test_a_program_leaves_ray_during_a_call(cluster: str) -> None:
    runs(SHUTDOWN, cluster)


def test_a_forked_child_that_collects_garbage_leaves_its_parents_connection_alone(
    cluster: str,
) -> None:
    runs(FORK, cluster)
