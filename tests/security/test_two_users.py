"""Two unprivileged users on one machine: neither uses files or clusters of the other.

test_squatted_sockets.py has sockets of another user, tests/mpi_workers/node/test_cleanup.py a lock.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.security.conftest import ROOT, line_of
from tests.support import commands

ALICE, MALLORY = 65533, 65534
LIMIT_S = 100

# The interpreter may be in a folder that only root can enter: imports come before the change.
AS_USER = """
import json, os, sys, tempfile
from pathlib import Path
sys.path.insert(0, {root!r})
from mpi_workers.node import cleanup, specs
shared = Path({shared!r})
tempfile.tempdir = str(shared)
os.setgroups([])
os.setresgid({uid}, {uid}, {uid})
os.setresuid({uid}, {uid}, {uid})
"""

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of two users"),
]


class Users:
    """A folder that every user may write, as /tmp, and programs of two users."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self._started: list[subprocess.Popen[str]] = []

    def start(self, uid: int, program: str) -> subprocess.Popen[str]:
        text = AS_USER.format(root=str(ROOT), shared=str(self.shared), uid=uid)
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", text + textwrap.dedent(program)],
            cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def result(self, uid: int, program: str) -> Any:
        """The JSON that a program prints."""
        process = self.start(uid, program)
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        return json.loads(said)

    def ready(self, uid: int, program: str) -> None:
        """Start a program that stays, and wait until it prints a line."""
        stay = "print('ready', flush=True)\nsys.stdin.read()"
        process = self.start(uid, textwrap.dedent(program) + stay)
        assert line_of(process) == "ready"

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def users() -> Iterator[Users]:
    shared = Path(tempfile.mkdtemp(prefix="sec-", dir="/tmp"))
    shared.chmod(0o1777)
    users = Users(shared)
    yield users
    users.end()
    shutil.rmtree(shared)


def test_a_forged_rank_file_is_not_read(users: Users) -> None:
    fields = {
        "token": "", "directory": "/d", "control": "tcp:203.0.113.9:1", "size": 1, "host": None,
        "crowded": False, "keep_bytes": 0, "options": {}, "data": "",
    }  # fmt: skip
    users.ready(
        MALLORY,
        f"""
        for mode in (0o755, 0o777):
            folder = shared / f"alchemist-g1-{{cleanup.machine_tag()}}-{{mode:o}}"
            folder.mkdir()
            folder.chmod(mode)
            (folder / "rank.json").write_text({json.dumps(fields)!r})
            (folder / "lock").touch()
        """,
    )
    found = users.result(
        ALICE,
        f"""
        specs.FIND_S = 0.2
        pattern = str(shared / "alchemist-g1-*" / "rank.json")
        try:
            first = specs.RankConfig.find(pattern).control
        except FileNotFoundError:
            first = "none"
        own = cleanup.PrivateFolder("g1")
        fields = json.loads({json.dumps(fields)!r}) | {{"control": "unix:own"}}
        (own.path / "rank.json").write_text(json.dumps(fields))
        print(json.dumps([first, specs.RankConfig.find(pattern).control]))
        own.remove()
        """,
    )
    assert found == ["none", "unix:own"]


def test_a_symbolic_link_as_folder_or_lock_costs_no_file(users: Users) -> None:
    users.result(
        ALICE,
        """
        (shared / "precious").mkdir(mode=0o700)
        for name in ("lock", "data"):
            (shared / "precious" / name).write_text("Alice's")
        print("[]")
        """,
    )
    users.ready(
        MALLORY,
        """
        name = f"alchemist-g1-{cleanup.machine_tag()}-"
        os.symlink(shared / "precious", shared / f"{name}folder")
        for mode in (0o700, 0o755, 0o777):
            folder = shared / f"{name}{mode:o}"
            folder.mkdir()
            os.symlink(shared / "precious" / "data", folder / "lock")
            os.symlink(shared / "precious" / "data", folder / "segments")
            folder.chmod(mode)
        """,
    )
    found = users.result(
        ALICE,
        """
        swept = cleanup.sweep()
        kept = sorted((f.name, f.read_text()) for f in (shared / "precious").iterdir())
        print(json.dumps([swept, cleanup.runs_here("g1"), kept]))
        """,
    )
    assert found == [0, False, [["data", "Alice's"], ["lock", "Alice's"]]]


# --- clusters ---

HEAD = """
import ray, sys
ray.init(num_cpus=1, include_dashboard=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
SESSION = """
import ray
from alchemist_ray import AlchemistSession
with AlchemistSession() as als:
    print(ray.get_runtime_context().gcs_address, flush=True)
ray.shutdown()
"""
# In a mount namespace with a /tmp of its own, where Ray's default folder is not used yet. Both
# users may read all files, because the interpreter may be in a folder of root.
TWO_CLUSTERS = """
import os, subprocess, sys
def start(uid, program):
    home = f"/tmp/home-{uid}"
    os.makedirs(home, exist_ok=True)
    os.chown(home, uid, uid)
    words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups",
             "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    # Ray starts its workers at niceness 15: too slow on a machine with other load.
    env = os.environ | {"HOME": home, "TMPDIR": "/tmp", "RAY_worker_niceness": "0"}
    env.pop("RAY_TMPDIR", None)
    return subprocess.Popen([*words, sys.executable, "-c", program], env=env, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
head = start(int(sys.argv[1]), sys.argv[2])
print("head", head.stdout.readline().strip(), flush=True)
for uid in sys.argv[1], sys.argv[3]:
    print(uid, start(int(uid), sys.argv[4]).communicate()[0].strip(), flush=True)
head.communicate()
"""


@pytest.mark.timeout(2 * LIMIT_S, func_only=True)  # three programs start Ray or join it
@pytest.mark.skipif(not all(map(shutil.which, ("unshare", "setpriv"))), reason="needs util-linux")
def test_a_session_does_not_join_the_cluster_of_another_user() -> None:
    if Path("/tmp") in ROOT.parents:
        pytest.skip("this clone is in /tmp, which the test replaces")
    alone = 'mount -t tmpfs -o mode=1777 tmpfs /tmp && exec "$@"'
    done = commands.run(
        "unshare", "--mount", "sh", "-c", alone, "sh", sys.executable, "-c", TWO_CLUSTERS,
        MALLORY, HEAD, ALICE, SESSION, limit_s=1.8 * LIMIT_S, cwd=ROOT, PYTHONPATH=str(ROOT),
    )  # fmt: skip
    if "mount" in done.stderr and not done.stdout:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    found = dict(line.split() for line in done.stdout.splitlines())
    assert set(found) == {"head", str(MALLORY), str(ALICE)}, done.stderr
    assert found["head"] == found[str(MALLORY)] != found[str(ALICE)]
