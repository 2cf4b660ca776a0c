"""``alchemist doctor`` on security and environment: each check, made to fail for real."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from alchemist_ray.observe.doctor import cli as doctor_cli
from alchemist_ray.observe.doctor import node
from alchemist_ray.observe.doctor.finding import BAD, INFO, NOTHING, OK, WARN, Finding
from tests.alchemist_ray.observe.test_doctor import expect

LISTENS = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""
OTHER = 54321  # a user id


def only(findings: Iterator[Finding]) -> Finding:
    (found,) = findings
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can enter, as those of the tests are not."""
    folder = Path("/tmp") / f"at-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o755)  # whatever the umask is
    yield folder
    shutil.rmtree(folder)


@contextmanager
def listener(word: str, **env: str) -> Iterator[str]:
    """A process with this word on its command line that listens at all interfaces; its port."""
    command = [sys.executable, "-c", LISTENS, "0.0.0.0", word]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("caller", ["token", "disabled"])
def test_open_ports_are_judged_by_the_ray_that_has_them(
    monkeypatch: pytest.MonkeyPatch, caller: str
) -> None:
    """Not by the variables of the caller: its Ray may have been started with others."""
    monkeypatch.setenv("RAY_AUTH_MODE", caller)
    with (
        listener("raylet", RAY_AUTH_MODE="disabled") as unguarded,
        listener("raylet", RAY_AUTH_MODE="token") as guarded,
        listener("mpi_workers", RAY_AUTH_MODE="disabled") as of_gang,
    ):
        found = list(node.open_ports(NOTHING))
    (warned,) = (each for each in found if f"*:{unguarded}" in each.message)
    expect(warned, WARN, "This Ray requires no token", "RAY_AUTH_MODE=token")
    for port in (guarded, of_gang):
        (told,) = (each for each in found if f"*:{port}" in each.message)
        expect(told, INFO, "require its token")


def test_a_caller_without_the_token_of_the_running_ray_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for modes, status in ({"token"}, BAD), ({"token", "disabled"}, WARN), (set[str](), WARN):
        monkeypatch.setattr(doctor_cli, "running_modes", lambda modes=modes: modes)
        (found,) = doctor_cli.authentication()
        expect(found, status, "mode disabled")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_ports_of_this_machine_alone_are_local(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("no IPv6 here")
    with closing(server):
        number = server.getsockname()[1]
        assert node.is_local(host)
        assert number not in {port for _, port, _ in node.reachable_ports()}


def test_a_token_that_others_may_read_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = place / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    expect(only(node.token_files(NOTHING)), INFO)
    token.write_text("secret")
    for folder_mode, mode, status in ((0o755, 0o644, WARN), (0o700, 0o644, OK), (0o755, 0o600, OK)):
        place.chmod(folder_mode)
        token.chmod(mode)
        advice = f"chmod 600 {token}" if status == WARN else ""
        expect(only(node.token_files(NOTHING)), status, advice=advice)


def test_a_session_folder_that_others_may_write_to_is_named(place: Path) -> None:
    session = place / "session_2026-01-01_1"
    session.mkdir()
    # It prints because its command line is empty in /proc for a moment after it has started.
    program = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, "raylet", f"--x={session}/s"]
    pipes: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for mode, status, words in (
            (0o777, WARN, "may write to"),
            (0o755, WARN, "may read"),
            (0o700, OK, "this user only"),
        ):
            session.chmod(mode)
            (found,) = (f for f in node.session_folders(NOTHING) if str(session) in f.message)
            expect(found, status, words)
        process.kill()


only_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can start a process of another user"
)


@only_root
def test_the_ray_of_another_user_is_named(place: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, place / "raylet")
    with subprocess.Popen([place / "raylet", "60"], user=OTHER) as process:
        found = only(node.other_users_ray(NOTHING))
        process.kill()
    expect(found, WARN, str(OTHER), "RAY_ADDRESS")


def test_a_strict_ptrace_scope_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scope"
    expect(only(node.ptrace_scope(NOTHING, path)), OK)
    for scope, status in ((1, OK), (2, WARN), (3, WARN)):
        path.write_text(f"{scope}\n")
        expect(only(node.ptrace_scope(NOTHING, path)), status)


def test_forced_kernels_of_openblas_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in node.FORCED:
        monkeypatch.delenv(name, raising=False)
    expect(only(node.openblas(NOTHING)), OK)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    expect(only(node.openblas(NOTHING)), WARN, advice="unset OPENBLAS_CORETYPE before")


def test_the_reference_blas_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "empty.c").write_text("int x_(void) { return 0; }\n")
    libraries = {}
    for kind in ("blas", "openblas-pthread"):
        folder = tmp_path / kind
        folder.mkdir()
        build = [compiler, "-shared", "-fPIC", "-o"]
        blas = folder / "libblas.so.3"
        source = str(tmp_path / "empty.c")
        subprocess.run([*build, blas, source, "-Wl,-soname,libblas.so.3"], check=True)
        libraries[kind] = folder / "libscalapack.so"
        link = ["-Wl,--no-as-needed", str(blas), f"-Wl,-rpath,{folder}"]
        subprocess.run([*build, libraries[kind], source, *link], check=True)
    for kind, status in (("blas", WARN), ("openblas-pthread", OK)):
        monkeypatch.setenv(node.SCALAPACK, str(libraries[kind]))
        expect(only(node.scalapack_blas(NOTHING)), status)
    monkeypatch.delenv(node.SCALAPACK)
    expect(only(node.scalapack_blas(NOTHING, tmp_path)), INFO)


@only_root
def test_other_users_on_a_node_of_a_job_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("PBS_JOBID", raising=False)
    assert list(node.shared_node(NOTHING)) == []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with subprocess.Popen(["sleep", "60"], user=OTHER) as process:
        try:
            found = only(node.shared_node(NOTHING))
        finally:
            process.kill()
    expect(found, WARN, str(OTHER), "--exclusive")
