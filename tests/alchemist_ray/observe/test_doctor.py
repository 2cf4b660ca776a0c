"""``alchemist doctor`` on one node: each check, made to fail for real."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from alchemist_ray import cli
from alchemist_ray.deploy.slurm.sites import Mpi, Nodes, Site
from alchemist_ray.observe.doctor import cli as doctor_cli
from alchemist_ray.observe.doctor import finding, node, probe
from alchemist_ray.observe.doctor.finding import BAD, INFO, NOTHING, OK, WARN, Finding, run_checks
from tests.mpi_workers.cgroups import limited_memory
from tests.support import commands, traces

ROOT = Path(__file__).parents[3]
SITE = Site(
    "ours", nodes=Nodes(interface=("hsn0",)), mpi=Mpi(library="$NOWHERE_DIR/lib/libmpi.so.12")
)
ASK = 'from alchemist_ray.observe.doctor import probe; import sys; sys.argv = ["x"]; probe.main()'
SICK = """
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs -o size=32m tmpfs "$SMALL"
export TMPDIR="$SMALL"
touch -d '10 minutes ago' /dev/shm/mpich_shm_stale
touch /dev/shm/mpich_shm_fresh
ulimit -n 64
ulimit -s 1024
exec "$@"
"""


def asked(command: list[str], request: list[Any], **env: str) -> dict[str, Any]:
    """The answer of a probe in a process of its own."""
    given = probe.encoded(request) + "\n"
    env = {"PYTHONPATH": str(ROOT), **env}
    said = commands.output(*command, sys.executable, "-c", ASK, given=given, **env)
    text = "".join(line.split("|", 2)[2] for line in said.splitlines())
    value: dict[str, Any] = probe.decoded(text)
    return value


def of(findings: Iterable[Finding], check: str) -> Finding:
    (found,) = (finding for finding in findings if finding.check == check)
    return found


def expect(found: Finding, status: str, message: str = "", advice: str = "") -> None:
    """Check the status of a finding, and words of it."""
    assert found.status == status, found
    assert message in found.message
    assert advice in found.advice


# --- a node that has nearly everything ------------------------------------------------


may_mount = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"),
    reason="mounting small file systems needs root and unshare",
)


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer of a probe in a small, starved, wrongly installed place."""
    folder = tmp_path_factory.mktemp("sick")
    small = folder / "small"
    small.mkdir()
    other = folder / "other" / "numpy-0.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.9\n")
    return asked(
        ["unshare", "--mount", "bash", "-c", SICK, "bash"],
        ["examine", [SITE, ["n1"]]],
        SMALL=str(small),
        PYTHONPATH=f"{other.parent}{os.pathsep}{ROOT}",
        MPI4PY_LIBMPI="/nowhere/libmpi.so.12",
    )


@may_mount
@pytest.mark.parametrize(
    ("check", "status", "message", "advice"),
    [
        ("/dev/shm", BAD, "67.1 MB", "--shm-size"),
        (
            "leftovers in /dev/shm",
            WARN,
            "1 segment that no process has open",
            "`rm /dev/shm/mpich_shm_stale`,",
        ),
        ("temporary folder", BAD, "33.6 MB free", "TMPDIR"),
        ("ulimit -n (files)", BAD, "64 (up to", "ulimit -n 65536"),
        ("ulimit -s (stack)", WARN, "1.0 MB", "ulimit -s 8192"),
        ("network interface", BAD, "no interface hsn0 (nodes.interface", "site file ours"),
        ("MPI library", BAD, "/nowhere/libmpi.so.12", "MPI4PY_LIBMPI"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    sick: dict[str, Any], check: str, status: str, message: str, advice: str
) -> None:
    found = of(sick["findings"], check)
    expect(found, status, message, advice)
    assert found.node == os.uname().nodename


@may_mount
def test_a_tiny_shm_is_named_and_the_mpi_is_found() -> None:
    mount = 'mount -t tmpfs -o size=100k tmpfs /dev/shm && exec "$@"'
    told = asked(
        ["unshare", "--mount", "bash", "-c", mount, "bash"], ["examine", [NOTHING, ["n1"]]]
    )
    expect(of(told["findings"], "/dev/shm"), BAD)
    expect(of(told["findings"], "MPI library"), OK)


def test_open_mpi_is_no_mpi_of_gangs() -> None:
    library = next(Path("/usr/lib").glob("*/libmpi.so.40"), None)
    if library is None:
        pytest.skip("no Open MPI on this machine")
    told = asked([], ["examine", [NOTHING, ["n1"]]], MPI4PY_LIBMPI=str(library))
    found = of(told["findings"], "MPI library")
    expect(found, WARN if shutil.which("srun") else BAD, "Open MPI v", "unset MPI4PY_LIBMPI")


@may_mount
def test_another_version_on_the_path_is_seen(sick: dict[str, Any]) -> None:
    assert sick["versions"]["numpy"] == "0.9"
    assert sick["versions"]["ray"] == node.versions()["ray"]


def test_a_limit_of_processes_is_counted_for_who_is_not_root() -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("becoming another user needs root and setpriv")
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (150, 150));"
        "from alchemist_ray.observe.doctor import node, finding;"
        "print(*(f.status for f in node.limits(finding.NOTHING) if '-u' in f.check))"
    )
    env = {"PYTHONPATH": str(ROOT), "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    done = commands.run(*nobody, sys.executable, "-c", code, **env)
    strange = ("Permission denied", "ModuleNotFoundError", "error while loading shared libraries")
    if any(words in done.stderr for words in strange):
        pytest.skip("another user cannot read this environment")
    assert done.stdout.split() == [BAD], done.stderr


def test_locked_memory_matters_where_there_is_rdma(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        pytest.skip("memory may be locked without limit here")
    check = "ulimit -l (locked memory)"
    expect(of(node.limits(NOTHING), check), OK)  # no device
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(node, "RDMA", tmp_path)
    expect(of(node.limits(NOTHING), check), WARN, "mlx5_0")


# --- memory and cores -----------------------------------------------------------------


def test_a_containers_memory_is_what_counts() -> None:
    code = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from alchemist_ray.observe.doctor import node, finding\n"
        "for f in node.memory(finding.NOTHING): print(f.status, f.message)\n"
    )
    with limited_memory(300 << 20) as folder:
        done = commands.python(code, folder / "cgroup.procs", PYTHONPATH=str(ROOT))
    assert done.stdout.startswith(BAD), done.stderr
    assert "limit 314.6 MB (cgroup)" in done.stdout


def test_more_cpus_than_cores_are_seen() -> None:
    cores = node.usable_cores()
    expect(next(iter(node.cores(NOTHING, cores))), OK)
    expect(next(iter(node.cores(NOTHING, cores + 1))), WARN, "share cores")


def test_gpus_that_ranks_cannot_use_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "DEVICES", tmp_path)
    expect(next(node.gpus(NOTHING)), INFO, "none")
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    expect(next(node.gpus(NOTHING)), OK, "2 NVIDIA GPUs; visible: 1")
    monkeypatch.setattr(node, "find_spec", lambda name: None)
    expect(next(node.gpus(NOTHING)), WARN, "PyTorch is not installed", "pip install torch")


def test_others_that_compute_there_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getloadavg()[0] == 0:
        pytest.skip("nothing at all has run here for a minute")
    monkeypatch.setattr(node, "BUSY", 0.0)
    expect(of(node.cores(NOTHING, 0.0), "load"), WARN)


def test_a_containers_share_of_time_bounds_its_cores(tmp_path: Path) -> None:
    v2 = tmp_path / "cpu.max"
    v2.write_text("50000 100000\n")
    assert node.usable_cores(v2) == 0.5
    v2.write_text("max 100000\n")
    assert node.usable_cores(v2) == len(os.sched_getaffinity(0))


def test_more_threads_than_cores_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    (found,) = node.threads()
    expect(found, WARN, "OMP_NUM_THREADS=100000")


def test_a_package_that_slows_every_process_of_ray_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # it may be installed here
    (found,) = node.imports(NOTHING)
    expect(found, OK)
    (tmp_path / "rfc3987_syntax.py").touch()
    importlib.invalidate_caches()
    (found,) = node.imports(NOTHING)
    expect(found, WARN, "1.4 s of CPU", "pip uninstall")


# --- the site, and Ray -----------------------------------------------------------------


def test_the_sites_mpi_is_looked_for() -> None:
    found = of(asked([], ["examine", [NOTHING, ["n1"]]])["findings"], "MPI library")
    expect(found, OK)
    path = found.message.rpartition(", ")[2]
    assert node.unfit("x", path, Site("ours", mpi=Mpi(library=path))) is None
    wrong = node.unfit("x", path, Site("ours", mpi=Mpi(library="/elsewhere/libmpi.so.12")))
    assert wrong is not None
    expect(wrong, BAD, advice="MPI4PY_LIBMPI=/elsewhere")
    unset = node.unfit("x", path, SITE)
    assert unset is not None
    assert "NOWHERE_DIR is not set" in unset.advice


def test_ray_on_an_address_that_others_do_not_reach() -> None:
    (found,) = node.used_interface(NOTHING, "127.0.0.1", peers=2)
    expect(found, BAD, advice="--node-ip-address")
    (found,) = node.used_interface(NOTHING, "203.0.113.77", peers=2)
    expect(found, BAD, "is on no interface")
    site = Site("ours", nodes=Nodes(interface=("lo",)))
    (found,) = node.used_interface(site, "127.0.0.1", peers=1)
    expect(found, OK)


@pytest.mark.parametrize(
    ("mode", "status", "message"), [(None, BAD, "there is no file"), (0o600, OK, "from")]
)
def test_the_token_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None, status: str, message: str
) -> None:
    path = tmp_path / "token"
    if mode is not None:
        path.write_text("secret")
        path.chmod(mode)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    (found,) = doctor_cli.authentication()
    expect(found, status, message)


def test_the_command_ends_with_one_where_nobody_answers() -> None:
    start = traces.clock()
    done = commands.alchemist("doctor", "--address", "127.0.0.1:9", "--json", code=1)
    told = json.loads(done.stdout)
    assert told["status"] == BAD
    found = [Finding(**finding) for finding in told["findings"]]
    said = "the cluster at 127.0.0.1:9 does not answer as a Ray head"
    expect(of(found, "Ray address"), BAD, said)
    expect(of(found, "MPI library"), OK)  # this node was looked at all the same
    assert traces.clock() - start < 60


def test_a_site_that_is_none_is_an_error_of_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--site", "atlantis"]) == 1
    assert capsys.readouterr().err.startswith("alchemist: SiteError: there is no site 'atlantis'")


def test_the_command_gives_up_when_its_time_is_over() -> None:
    done = commands.alchemist("doctor", "--no-ranks", "--limit=0.05", code=1, limit_s=60)
    assert "after 0.05 s" in done.stdout


# --- how checks are run, and shown ----------------------------------------------------


def test_a_check_that_hangs_or_raises_is_a_finding(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def hangs(site: Site) -> list[Finding]:
        pipe.read_text()  # nobody writes
        return []

    def raises(site: Site) -> list[Finding]:
        raise OSError("no luck")

    def starts(site: Site) -> list[Finding]:
        raise subprocess.TimeoutExpired("java", 8)

    def works(site: Site) -> list[Finding]:
        return [Finding(OK, "well", check="works")]

    start = traces.clock()
    checks = {"hangs": hangs, "raises": raises, "starts": starts, "works": works}
    found = run_checks(checks, NOTHING, 0.5)
    assert traces.clock() - start < 5
    statuses = [("hangs", BAD), ("raises", WARN), ("starts", BAD), ("works", OK)]
    assert [(f.check, f.status) for f in found] == statuses
    assert found[0].message == found[2].message == "no answer in 0.5 s"
    assert "OSError: no luck" in found[1].message
    pipe.write_text("the thread may go")


def test_what_is_not_ok_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="needs advice"):
        Finding(BAD, "broken", check="x")
    for found in probe.Probe().examine(NOTHING, ["n1"])["findings"]:
        assert found.status in (OK, "info") or found.advice


def test_the_table_puts_nodes_together() -> None:
    nodes = ["n1", "n2", "n3"]
    findings = [Finding(OK, "65536", node=n, check="files") for n in nodes]
    findings += [Finding(BAD, "64 MB", "a larger one", node="n2", check="shm")]
    text = finding.table(findings, nodes)
    assert "all 3 nodes: 65536" in text
    assert "bad  shm                        n2: 64 MB\n" in text
    assert "-> a larger one" in text
    assert text.endswith("3 nodes: 1 bad, 0 warnings\n")
    assert [finding.verdict(some) for some in (findings, findings[:3])] == [BAD, OK]
    assert json.loads(finding.as_json(findings, nodes))["status"] == BAD
