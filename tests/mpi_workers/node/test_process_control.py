"""Descendants of a process are found and killed, wherever they have gone."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path

from mpi_workers.node.processes import LocalRanks, descendants
from mpi_workers.node.specs import GangPlan, NodePlan
from tests.support import commands, traces

PROGRAM = """
import os, subprocess, sys, time
from mpi_workers.node.processes import adopt_orphans, descendants, end_descendants

def daemon():
    # A grandchild in a session of its own, whose parent has ended.
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "100"])
        os._exit(0)
    os.waitpid(child, 0)

adopt_orphans()
daemon()
bomb = subprocess.Popen(["sh", "-c", "while :; do sleep 100 & sleep 0.01; done"])
spared = subprocess.Popen(["sh", "-c", "sleep 100 & wait"])
time.sleep(0.3)
before = descendants([os.getpid()])
end_descendants(spared=[spared.pid])
after = descendants([os.getpid()])
print(len(before), len(after), spared.poll())
end_descendants()
print(len(descendants([os.getpid()])))
"""


def test_descendants_end_also_orphans_and_what_they_start_meanwhile() -> None:
    done = commands.python(PROGRAM)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    before, after, spared = first.split()
    assert int(before) > 4
    assert (after, spared) == ("2", "None")  # the spared child and its child
    assert last == "0"


def test_descendants_are_found_by_their_parents() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 100 & wait"]) as shell:
        assert traces.wait_until(lambda: bool(descendants([shell.pid])), 10) is not None
        (sleep,) = descendants([shell.pid])
        assert Path(f"/proc/{sleep}/comm").read_text() == "sleep\n"
        assert {shell.pid, sleep} <= descendants([os.getpid()])
        os.kill(sleep, 9)


LIMITED = """
import os, resource, sys
from multiprocessing.connection import Connection
from mpi_workers.failures import Failure
from mpi_workers.node import fork_server
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def run_proxy(plan, node):
    kept = [os.pipe() for _ in range(128)]
    print(plan.gang, len(kept), flush=True)
    raise Failure("LaunchError", "it was a test")

fork_server.main(Connection(int(sys.argv[1])), run_proxy)
"""


def test_proxies_may_open_as_many_files_as_many_ranks_need(tmp_path: Path) -> None:
    """A fork server that was started with a low limit raises it; it tells why they ended."""
    ours, theirs = Pipe()
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-c", LIMITED, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )  # fmt: skip
    with ours:
        ours.send((GangPlan("g", (NodePlan("127.0.0.1", 1),), "token", (), 0), 0))
        warm, read, gone = (ours.recv() for _ in range(3))
    output, errors = server.communicate(timeout=60)
    assert (output, errors.split(": ")[-1]) == ("g 128\n", "it was a test\n")
    assert (warm[0], *read[:2], *gone) == ("warm", "read", "g", "gone", "g", "it was a test")


LISTENER = """
import socket, sys
from mpi_workers.node.processes import close_listeners
from tests.support.traces import listening_ports
import os
listener = socket.create_server(("127.0.0.1", 0))
near, far = socket.socketpair()
before = listening_ports(os.getpid())
close_listeners()
near.sendall(b"still open")
print(len(before), listening_ports(os.getpid()), far.recv(99))
listener.detach()
"""


def test_inherited_listeners_are_closed_and_no_other_socket() -> None:
    done = commands.python(LISTENER)
    assert done.stdout == "1 [] b'still open'\n", done.stderr


def test_children_that_a_thread_reaps_itself_disturb_nobody() -> None:
    """py-spy runs in threads of the proxy, which reaps all its children."""
    plan = GangPlan("g", (NodePlan("127.0.0.1", 1),), "token", (), 0)
    ranks = LocalRanks(plan, 0)
    with ThreadPoolExecutor(4) as pool:
        programs = [pool.submit(subprocess.run, ["true"], check=False) for _ in range(300)]
        while not all(program.done() for program in programs):
            assert list(ranks.ended_children()) == []
    assert [program.exception() for program in programs] == [None] * len(programs)


def test_forked_ranks_draw_different_random_numbers() -> None:
    """NumPy's generator was copied: all ranks of all gangs of a fork server drew the same."""
    program = """
import os, random
import numpy.random as nr  # before the fork, as SciPy does in a fork server
from mpi_workers.node.processes import fork

def draw():
    os.write(1, f"{nr.random()} {random.random()}\\n".encode())
    os._exit(0)

for _ in range(2):
    os.waitpid(fork(draw), 0)
"""
    done = commands.python(program)
    assert done.returncode == 0, done.stderr
    numbers = done.stdout.split()
    assert len(set(numbers)) == len(numbers) == 4, done.stdout
