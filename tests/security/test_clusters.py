"""A session joins clusters of its own user only, and never waits for one that cannot be joined."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray

from alchemist_ray.cluster import ray_cluster
from alchemist_ray.cluster.ray_cluster import (
    check,
    check_versions,
    own_head,
    private_folder,
    tighten,
)
from alchemist_ray.errors import AuthError, SessionError
from mpi_workers.node.processes import descendants
from tests.support import commands, traces

ROOT = Path(__file__).parents[2]
STRANGER = 65534  # nobody


def as_stranger(work: Callable[[], str]) -> str:
    """The result of `work` in a forked child of another user."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            os.write(write_end, work().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_users_head_is_not_found(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[2]
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    assert own_head() == cluster
    assert as_stranger(lambda: str(own_head())) == "None"


def test_a_head_of_another_tmpdir_is_not_found(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_cluster, "_default_folder", lambda: tmp_path)
    monkeypatch.setattr(ray_cluster, "_short_folder", lambda: tmp_path)
    assert own_head() is None


@contextlib.contextmanager
def place_for_ray() -> Iterator[Path]:
    """A folder with a short path, in which a Ray may run; its processes end with it."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="al-"))
    folder.chmod(0o755)
    yield folder
    for pid, line in traces.processes().items():
        if str(folder) in line and pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def place() -> Iterator[Path]:
    with place_for_ray() as folder:
        yield folder


def outside(program: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program that is in no cluster."""
    env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    return commands.python(program, limit_s=150, cwd=ROOT, env={**env, **more})


def start_head(*options: str, **more: str) -> str:
    """Run ``ray start``; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    subprocess.run(
        [str(Path(sys.executable).with_name("ray")), "start", "--head", "--num-cpus=2",
         "--include-dashboard=false", f"--port={port}", "--node-ip-address=127.0.0.1", *options],
        env={**{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}, **more},
        check=True, timeout=100, capture_output=True,
    )  # fmt: skip
    return port


@pytest.mark.parametrize("by", ["RAY_TMPDIR", "--temp-dir", "auto"])
def test_a_head_of_ray_start_is_joined(place: Path, by: str) -> None:
    """Ray's folder is ray below RAY_TMPDIR; a second cluster was started beside the user's."""
    env = {"RAY_TMPDIR": str(place)} if by == "RAY_TMPDIR" else {}
    port = start_head(*([] if env else ["--temp-dir", str(place)]), **env)
    if by == "auto":  # as `ray.init` would, whatever RAY_TMPDIR says
        env = {"RAY_ADDRESS": "auto", "RAY_TMPDIR": str(place / "mine")}
    program = """
        import ray
        from alchemist_ray import AlchemistSession
        with AlchemistSession(1) as als:
            print(als.run(lambda comm: comm.size), ray.get_runtime_context().gcs_address)
    """
    done = outside(program, **env)
    assert re.search(rf"^1 \S+:{port}$", done.stdout, re.M), done.stderr


@pytest.mark.parametrize(
    ("below", "said"),
    [
        ("", "127.0.0.1:1 ({place}) does not answer as a Ray head"),
        ("mine", "a Ray head of this user runs at 127.0.0.1:1 in {place}. It is not joined, as "
         "RAY_TMPDIR={place}/mine: set RAY_ADDRESS=127.0.0.1:1 to join it"),
    ],
    ids=["dead", "of-another-RAY_TMPDIR"],
)  # fmt: skip
def test_a_head_that_is_not_joined_is_warned_of(place: Path, below: str, said: str) -> None:
    """A process that looks like a raylet of `ray start`: its parent is no Python program."""
    waits = f"'import time; time.sleep(60)' --temp-dir={place} --gcs-address=127.0.0.1:1"
    (place / "mine").mkdir()
    program = """
        from alchemist_ray.cluster.ray_cluster import join_ray
        join_ray(None, start=False)
    """
    command = f"(exec -a raylet {sys.executable} -c {waits}); true"
    with subprocess.Popen(["bash", "-c", command]) as parent:
        try:
            done = outside(program, RAY_TMPDIR=str(place / below))
        finally:
            for pid in descendants([parent.pid]):
                os.kill(pid, signal.SIGKILL)
    assert said.format(place=place) in done.stderr
    assert ". It is not joined" in done.stderr
    assert "SessionError: no Ray cluster of this user runs on this machine" in done.stderr


# Two threads start a cluster of the program's own; sessions use it.
OWN_CLUSTER = """
import json, os, stat, threading, time
from pathlib import Path
import ray
from alchemist_ray import AlchemistSession
from alchemist_ray.errors import SessionError

def mode(path):
    return oct(stat.S_IMODE(path.stat().st_mode))

sessions = []
threads = [threading.Thread(target=lambda: sessions.append(AlchemistSession())) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
time.sleep(0.5)
seven = ray.get(ray.remote(lambda: 7).remote(), timeout=30)
token = Path("~/.ray/auth_token").expanduser()
sockets = Path(ray.nodes()[0]["RayletSocketName"])
above = [stat.S_IMODE(folder.stat().st_mode) & 0o077 for folder in sockets.parents]
private = [mode(token.parent), mode(token), 0 in above[:-2]]
more = 2 * max(os.cpu_count(), 4)
with AlchemistSession(more) as als:
    shared = als.run(lambda comm: [comm.size, os.nice(0)]) == [more, os.nice(0)]
address = ray.get_runtime_context().gcs_address
refusals = []
for als in sessions:
    try:
        als.connect_to_alchemist("127.0.0.1", 1)
    except SessionError as error:
        refusals.append(str(error))
stays = ray.get_runtime_context().gcs_address == address
print(json.dumps(dict(seven=seven, private=private, shared=shared, refusals=sorted(refusals),
                      stays=stays)))
"""


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[dict[str, Any]]:
    """What `OWN_CLUSTER` finds, and its standard error.

    A file of another user names a cluster: Ray joins the one that `ray_current_cluster` names,
    which anyone can write in /tmp/ray.
    """
    with place_for_ray() as place:
        for folder in (place / "home", place / "ray"):
            folder.mkdir()
        for folder in (place, place / "ray"):
            (folder / "ray_current_cluster").write_text("127.0.0.1:1")
        env = {"HOME": str(place / "home"), "RAY_TMPDIR": str(place), "RAY_AUTH_MODE": "token"}
        done = outside(OWN_CLUSTER, **env)
        assert done.returncode == 0, done.stderr
        yield {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def test_threads_that_start_a_cluster_share_it_and_it_outlives_them(
    own_cluster: dict[str, Any],
) -> None:
    assert own_cluster["seven"] == 7


def test_token_and_sockets_are_private_after_the_first_start(own_cluster: dict[str, Any]) -> None:
    assert own_cluster["private"] == ["0o700", "0o600", True]


def test_more_ranks_than_the_cluster_has_cpus_share_them_with_a_warning(
    own_cluster: dict[str, Any],
) -> None:
    assert own_cluster["shared"]
    assert own_cluster["stderr"].count("physical cores of this machine") == 1


@pytest.mark.parametrize(("ranks", "load", "warned"), [(2, 9.0, 1), (2, 1.5, 0), (1, 9.0, 0)])
def test_ranks_on_busy_cores_are_warned_of(
    ranks: int, load: float, warned: int,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Two ranks of a simulator made 3 to 9 steps a second there, and one 522."""
    monkeypatch.setattr(ray_cluster, "physical_cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    ray_cluster.warn_of_shared_cores.__wrapped__(ranks, 1)
    assert caplog.text.count("(load 9.0): each step of 2 ranks waits") == warned


def test_a_session_does_not_leave_its_cluster_for_an_address_without_one(
    own_cluster: dict[str, Any],
) -> None:
    of_starter, of_other = own_cluster["refusals"]
    assert "127.0.0.1:1 does not answer as a Ray head" in of_starter
    assert "this process is in the Ray cluster at " in of_other
    assert own_cluster["stays"]


ENDS_RAYLETS = """
    import logging, os, psutil, signal, threading, time
    from pathlib import Path
    from alchemist_ray import AlchemistSession
    from alchemist_ray.errors import LaunchError
    from mpi_workers.node.processes import descendants

    logging.basicConfig()

    def kill(left: int) -> None:
        while left:
            for pid in descendants([os.getpid()]):
                try:
                    if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
                        os.kill(pid, signal.SIGSTOP)  # before it is ready
                        time.sleep(1)  # until it has been seen
                        os.kill(pid, signal.SIGKILL)
                        left -= 1
                        print(time.monotonic() - begun)
                        while Path(f"/proc/{pid}").exists():
                            time.sleep(0.05)
                except OSError:
                    pass
            time.sleep(0.05)

    begun = time.monotonic()
"""


def test_a_ray_that_does_not_start_is_one_error_with_its_log(place: Path) -> None:
    program = f"""{ENDS_RAYLETS}
    threading.Thread(target=kill, args=(99,), daemon=True).start()
    try:
        AlchemistSession(1, start_timeout_s=20)
    except LaunchError as error:
        print(str(error).splitlines()[0])
    """
    with traces.within(90):
        done = outside(program, RAY_TMPDIR=str(place))
        wanted = r"Ray did not start in \d+ s: its raylet has ended"
        assert re.match(wanted, done.stdout.splitlines()[-1]), done.stdout + done.stderr[-2000:]
    assert (
        1 <= done.stderr.count("Ray does not start: its raylet has ended") <= ray_cluster.ATTEMPTS
    )


def test_a_start_whose_raylet_ends_is_repeated_at_once(place: Path) -> None:
    program = f"""{ENDS_RAYLETS}
    threading.Thread(target=kill, args=(1,), daemon=True).start()
    with AlchemistSession(2, start_timeout_s=100) as als:
        print(als.run(lambda comm: comm.allreduce(1)))
        raylet = next(each for each in psutil.Process().children() if each.name() == "raylet")
        print(*(word for word in raylet.cmdline() if word.startswith("--runtime_env_agent_port=")))
    """
    done = outside(program, RAY_TMPDIR=str(place))
    killed, *rest = done.stdout.splitlines()
    assert rest[0] == "2", done.stdout + done.stderr[-2000:]
    assert re.fullmatch(r"--runtime_env_agent_port=[1-9]\d+", rest[1])  # it waits for no file
    (taken,) = re.findall(r"Ray did not start in (\d+) s: its raylet has ended", done.stderr)
    assert int(taken) < float(killed) + 20  # Ray itself waits for 30 s more


def test_a_raylet_need_not_wait_for_its_dashboard_agent(tmp_path: Path) -> None:
    (tmp_path / "metrics_agent_port_ab12").write_text("8080")  # the agent was faster
    words = [
        "raylet",
        "--static_resource_list=CPU,2",
        f"--session_dir={tmp_path}",
        "--node_id=ab12",
    ]
    for _ in range(2):
        ray_cluster._go_on_without_agent(words)
        ray_cluster._go_on_without_agent(["raylet"])
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "metrics_agent_port_ab12": "8080",
        "metrics_export_port_ab12": "-1",
        "dashboard_agent_listen_port_ab12": "-1",
    }


def test_the_log_is_that_of_this_programs_ray(tmp_path: Path) -> None:
    """Two programs that start a Ray share a folder, and `session_latest` names the later one."""
    for second, pid in ((1, os.getpid()), (2, os.getpid()), (3, 1)):
        logs = tmp_path / f"session_2026-11-28_17-00-0{second}_000000_{pid}" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text(f"raylet {second} of {pid}")
    (tmp_path / "session_latest").symlink_to(logs.parent)
    assert f"raylet 2 of {os.getpid()}" in ray_cluster._logs_of(tmp_path, "raylet")


def test_auto_starts_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster, "heads", list)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(SessionError, match="set RAY_ADDRESS to that of one, or start one with"):
        ray_cluster.join_ray(1)


@pytest.fixture
def web_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("where", ["nothing", "web_server", "silent"])
def test_an_address_without_a_head_is_refused_in_seconds(
    where: str, request: pytest.FixtureRequest
) -> None:
    address = "127.0.0.1:1" if where == "nothing" else request.getfixturevalue(where)
    said = "does not answer as a Ray head"
    with traces.within(8), pytest.raises(SessionError, match=said):  # 5 s on a quiet machine
        check(address, f"RAY_ADDRESS={address}")


def test_a_head_whose_raylet_has_ended_is_told_in_a_sentence(place: Path) -> None:
    port = start_head(RAY_TMPDIR=str(place))
    (raylet,) = [
        pid for pid, line in traces.processes().items()
        if f"--session_dir={place}" in line and "/raylet " in line
    ]  # fmt: skip
    os.kill(raylet, signal.SIGKILL)
    program = "from alchemist_ray.cli import main; raise SystemExit(main(['status']))"
    env = {"RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_gcs_server_request_timeout_seconds": "5"}
    done = outside(program, RAY_TMPDIR=str(place), **env)
    for pid, line in traces.processes().items():
        if f":{port} " in line and "ray.util.client.server" in line:  # it does not name the folder
            os.kill(pid, signal.SIGKILL)
    assert done.returncode == 1
    assert "its GCS answers, but no raylet of this cluster runs on this machine" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("ray_version", "python_version", "words"),
    [("2.9.0", "3.11.7", "runs Ray 2.9.0"), (ray.__version__, "3.9.1", "runs Python 3.9.1")],
)
def test_a_head_of_another_version_is_refused(
    ray_version: str, python_version: str, words: str
) -> None:
    with pytest.raises(SessionError, match=words):
        check_versions(ray_version, python_version, "the head")


class WantsToken(grpc.GenericRpcHandler):
    """A head behind a token."""

    def service(self, details: Any) -> Any:
        def refuse(request: bytes, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")

        return grpc.unary_unary_rpc_method_handler(refuse)


def test_a_head_that_requires_a_token_is_refused() -> None:
    server = grpc.server(ThreadPoolExecutor(1), [WantsToken()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(AuthError, match="RAY_AUTH_TOKEN_PATH"):
            check(f"127.0.0.1:{port}", "the head")
    finally:
        server.stop(None)


def test_a_live_head_is_joined_and_a_proxy_of_the_site_is_not_asked(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(cluster, "it")
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    check(cluster, "it")


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "http://127.0.0.1:8265"])
def test_an_address_of_another_service_is_refused_at_once(address: str) -> None:
    with pytest.raises(SessionError, match="not the address of a Ray head"):
        check(address, f"RAY_ADDRESS={address}")


def test_a_dead_RAY_ADDRESS_is_one_clear_error(cluster: str) -> None:
    program = "from alchemist_ray import AlchemistSession; AlchemistSession(1)"
    done = commands.python(program, cwd=ROOT, RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 1
    assert "SessionError: RAY_ADDRESS=127.0.0.1:1 does not answer" in done.stderr
    assert "InvalidAuthToken" not in done.stderr


# --- folders and tokens ---


def test_a_cluster_of_a_session_lies_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(ray_cluster, "_default_folder", lambda: Path("/tmp") / tmp_path.name)
    folder = private_folder()
    assert folder is not None
    try:
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        folder.parent.chmod(0o777)  # Ray opens its folders to every user
        assert private_folder() == folder
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    finally:
        folder.parent.rmdir()


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a folder to another user")
def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    squatted = Path("/tmp") / tmp_path.name
    squatted.mkdir()
    try:
        os.chown(squatted, STRANGER, STRANGER)
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
        monkeypatch.setattr(ray_cluster, "_default_folder", lambda: squatted)
        assert private_folder() is None
        assert "belongs to another user" in caplog.text
    finally:
        squatted.rmdir()


def test_tokens_become_readable_by_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder, token = tmp_path / ".ray", tmp_path / ".ray" / "auth_token"
    folder.mkdir(mode=0o755)
    token.write_text("secret")
    token.chmod(0o644)
    tighten()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
