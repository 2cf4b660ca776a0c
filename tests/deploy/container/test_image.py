"""The image, built from the Containerfile and run for real: by podman, and by Charliecloud."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from alchemist_ray import __version__
from tests.deploy.container import images
from tests.support import commands, traces

SIZE_LIMIT = 1100 << 20  # bytes; it has 935 MiB, 230 of them Ray's
DEMO_LIMIT_S = 240.0
# Podman would give more than is ours to give where root is not all-powerful. Processes are counted
# for the user, in whatever container.
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=16384:16384")
SEALED = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--shm-size=1g")
OUTSIDE = "/srv"  # of the tree: what runs there is the image's


def podman(*words: Any, limit_s: float = 60.0) -> str:
    """Run a command of podman; what it printed. Fails the test if it fails."""
    return run(*images.in_store("podman", *words), limit_s=limit_s)


def run(*words: Any, **options: Any) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return commands.output(*words, env=env, cwd=OUTSIDE, merged=True, **options)


def inside(image: str, *words: str, user: str = "", options: tuple[str, ...] = ()) -> str:
    """Run a command in the image, as tightly shut as Kubernetes would."""
    who = [f"--user={user}"] if user else []
    shut = [*SEALED, *LIMITS, "--network=none"]
    return podman("run", "--rm", *shut, *who, *options, image, *words)


def assert_demo(said: str) -> None:
    assert "singular values differ by" in said, said
    assert "The picture: out/demo.png" in said


@pytest.mark.parametrize("network", ["none", "host"])
def test_it_answers_with_the_demo(image: str, network: str) -> None:
    """As anybody who starts it without a word: not root, nothing of it can be changed."""
    said = podman(
        "run", "--rm", *SEALED, *LIMITS, f"--network={network}", image, limit_s=DEMO_LIMIT_S
    )
    assert_demo(said)


CLIENT = """
import numpy as np
from alchemist_ray import AlchemistSession
A = np.random.default_rng(0).random((300, 40))
with AlchemistSession(2) as als:
    S, U, V = als.load_library("linalg").truncated_svd(als.send_matrix(A), 5)
    assert np.allclose(S.fetch(), np.linalg.svd(A, compute_uv=False)[:5])
print("done")
"""


def test_it_is_a_server_with_the_client_outside(image: str) -> None:
    """The commands of docs/gateway.md; this network has no `-p`, and other heads run in it."""
    port = traces.free_port()
    server = f"ray start --head --port 0 && alchemist gateway --port {port} && sleep infinity"
    name = podman(
        "run", "-d", *SEALED, *LIMITS, "--network=host", image, "sh", "-c", server
    ).strip()
    try:
        accepts = lambda: "Accepting connections" in podman("logs", name)  # noqa: E731
        up = traces.wait_until(accepts, DEMO_LIMIT_S, 1.0)
        assert up is not None, podman("logs", name)
        token = podman("exec", name, "alchemist", "token", "create", "me").strip()
        said = run(
            sys.executable, "-c", CLIENT, limit_s=DEMO_LIMIT_S, PYTHONPATH=str(images.TREE),
            ALCHEMIST_ADDRESS=f"alchemist://127.0.0.1:{port}", ALCHEMIST_TOKEN=token,
        )  # fmt: skip
        assert said.endswith("done\n")
    finally:
        podman("rm", "--force", "--time=1", name)


@pytest.mark.skipif(shutil.which("ch-run") is None, reason="no ch-run; apt-get: charliecloud")
def test_charliecloud_runs_it_unpacked(image: str) -> None:
    """With the caller's own environment, which knows nothing of the image."""
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # Ray looks for others
    words = ["ch-run", "--private-tmp", "--cd=/tmp", images.image_root(), "--", "alchemist", "demo"]
    assert_demo(run(*alone, *words, limit_s=DEMO_LIMIT_S, USER="root", HOME="/tmp"))


@pytest.mark.parametrize("user", ["", "0:0", "4711:0"])
def test_its_commands_are_on_the_path_of_every_user_and_shell(image: str, user: str) -> None:
    find = "command -v alchemist ray python3 mpiexec tini"
    wanted = [f"/usr/local/bin/{name}" for name in ("alchemist", "ray", "python3", "mpiexec")]
    for shell in (["bash", "-c", "--"], ["bash", "-lc"], ["env", "-u", "HOME", "bash", "-c"]):
        assert inside(image, *shell, find, user=user).split() == [*wanted, "/usr/bin/tini"]


def test_it_runs_as_a_user_that_it_does_not_know(image: str) -> None:
    """As on machines that give every project a number of its own."""
    code = (
        "import os, alchemist_ray; print(os.getuid(), os.environ['HOME'], alchemist_ray.__file__)"
    )
    told = inside(image, "python3", "-c", code, user="4711:0").split()
    assert told[:2] == ["4711", "/tmp"]
    assert told[2].startswith("/usr/local/lib/")


def test_who_it_is_and_what_it_says_of_itself(image: str) -> None:
    about = json.loads(podman("image", "inspect", image))[0]
    config = about["Config"]
    assert config["User"] == "1000:1000"
    assert config["Entrypoint"] == ["/usr/bin/tini", "--"]
    assert config["Cmd"] == ["alchemist", "demo"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.title"] == "Alchemist on Ray"
    assert inside(image, "cat", "/proc/1/comm").strip() == "tini"
    assert about["Size"] < SIZE_LIMIT


def test_nothing_is_in_it_that_should_not_be(image: str) -> None:
    look = (
        "import ctypes.util, json, os, pathlib, shutil\n"
        "print(json.dumps({\n"
        " 'compilers': [n for n in ('cc', 'gcc', 'uv') if shutil.which(n)],\n"
        " 'lists': os.listdir('/var/lib/apt/lists'),\n"
        " 'secrets': [str(p) for p in (*map(pathlib.Path, ('/run/secrets', '/build', '/project',\n"
        "     '/etc/pip.conf')), *(pathlib.Path('/root', name) for name in ('.config', '.cache',\n"
        "     '.netrc'))) if p.exists()],\n"
        " 'writable': [d for d, _, _ in os.walk('/usr') if os.stat(d).st_mode & 0o022],\n"
        " 'setuid': [os.path.join(d, f) for d, _, fs in os.walk('/usr/local') for f in fs\n"
        "     if os.lstat(os.path.join(d, f)).st_mode & 0o6000],\n"
        " 'tests': os.path.isdir('/usr/local/lib/python3.11/site-packages/tests'),\n"
        " 'environment': sorted(os.environ)}))"
    )
    told = json.loads(inside(image, "python3", "-c", look, user="0:0"))
    environment = set(told.pop("environment"))
    empty: dict[str, Any] = {n: [] for n in ("compilers", "lists", "secrets", "writable", "setuid")}
    assert told == empty | {"tests": False}
    known = {"HOME", "HOSTNAME", "LC_CTYPE", "PATH", "PYTHONUNBUFFERED", "RAY_USAGE_STATS_ENABLED"}
    assert environment <= known | {"TERM", "container"}


def test_it_lists_what_is_in_it(image: str) -> None:
    """The versions that are locked, as JSON; and Debian's packages."""
    listed = json.loads(inside(image, "python3", "-m", "pip", "inspect", "--local"))["installed"]
    found = {each["metadata"]["name"]: each["metadata"]["version"] for each in listed}
    assert found["alchemist-on-ray"] == __version__
    assert f"ray=={found['ray']}" in (images.TREE / "constraints.txt").read_text()
    assert "tini\t" in inside(image, "dpkg-query", "-W")


def test_every_locked_version_has_its_hashes() -> None:
    """`make lock` writes both files; no image is needed."""
    names = (images.TREE / name for name in ("constraints.txt", "kuberay/hashes.txt"))
    locked, hashed = (path.read_text().splitlines() for path in names)
    assert [line.partition(" --hash=sha256:")[0] for line in hashed] == locked


def test_the_build_says_what_is_wrong_with_it() -> None:
    """No image is needed: the Containerfile as text."""
    run(Path(sys.executable).parent / "hadolint", "--no-color", images.TREE / "Containerfile")
