"""libvirt's definitions of guests: as text against golden files, and against libvirt's own schema.

``python -m tests.deploy.virtual.test_render`` rewrites the golden files.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import os
import re
import shutil
import stat
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray import cli
from alchemist_ray.deploy.virtual_cluster import cluster, guests, image
from alchemist_ray.deploy.virtual_cluster.guests import (
    Cell,
    Options,
    guests_of,
    parse_cells,
    parse_memory,
    settings,
    split_memory,
)
from alchemist_ray.errors import JobError, LaunchError
from tests.support import commands

GOLDEN = Path(__file__).with_name("golden")
# As on the report's machine: two processors; InfiniBand below the bridge.
CASES = {
    "one-guest-two-nodes": ["--cells", "0-11;12-23", "--memory", "64G", "--mtu", "65520"],
    "two-guests-two-hosts": [
        "--cells", "0-11;12-23", "--guests", "2", "--hosts", "2", "--memory", "32G",
        "--mtu", "9000", "--bridge", "ib-br", "--network", "10.8.0.0/16",
    ],
    "three-guests-uneven": ["--cells", "0-3;4-7", "--guests", "3", "--cpus", "2", "--name", "hpc"],
    "emulated": ["--cells", "0", "--memory", "1G", "--emulate", "--no-huge-pages"],
    "function-and-volume": [
        "--cells", "0-3", "--sriov", "fast", "--volume", "/srv/alchemist", "--mtu", "9000",
    ],
    "settings": ["--cells", "0-3", "--guests", "2", "--settings"],
    "settings-of-all": [
        "--cells", "0-3", "--guests", "2", "--settings", "--static-arp", "--volume", "/srv",
    ],
}  # fmt: skip
DOMAINS = [name for name in CASES if not name.startswith("settings")]


def rendered(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["virtual-cluster", "render", *words]) == 0
    return out.getvalue()


def definitions(text: str) -> list[str]:
    return [f"<domain{part}" for part in text.split("<domain")[1:]]


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_it_was(name: str) -> None:
    assert rendered(*CASES[name]) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", DOMAINS)
def test_libvirts_schema_has_nothing_against_it(name: str, tmp_path: Path) -> None:
    if not shutil.which("virt-xml-validate"):
        pytest.skip("no virt-xml-validate (apt-get install libvirt-clients libxml2-utils)")
    for number, text in enumerate(definitions((GOLDEN / f"{name}.txt").read_text())):
        path = tmp_path / f"{number}.xml"
        path.write_text(text)
        commands.output("virt-xml-validate", path, "domain")
        path.write_text(text.replace("<vcpu ", "<vcpus "))
        assert commands.run("virt-xml-validate", path, "domain").returncode != 0  # it does look


def test_libvirt_itself_takes_them(tmp_path: Path) -> None:
    if not shutil.which("virsh"):
        pytest.skip("no virsh (apt-get install libvirt-clients)")
    path = tmp_path / "guest.xml"
    for name in ("one-guest-two-nodes", "emulated", "function-and-volume"):
        path.write_text(definitions((GOLDEN / f"{name}.txt").read_text())[0])
        commands.output("virsh", "-c", "test:///default", "define", "--validate", path)


# --- cores and addresses --------------------------------------------------------------

cpus = st.frozensets(st.integers(0, 300), min_size=1)


@given(cpus)
def test_lists_of_cores_are_read_as_they_are_written(found: frozenset[int]) -> None:
    assert guests.parse_cpus(guests.format_cpus(found)) == tuple(sorted(found))


@given(st.lists(st.integers(1, 16), min_size=1, max_size=4), st.integers(1, 8))
def test_no_two_vcpus_share_a_core(sizes: list[int], count: int) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    cells = [
        Cell(i, tuple(range(a, a + n))) for i, (a, n) in enumerate(zip(starts, sizes, strict=True))
    ]
    if sum(sizes) < count:
        with pytest.raises(ValueError, match="do not fit"):
            guests.shares(cells, count, None)
        return
    shares = guests.shares(cells, count, None)
    used = [cpu for share in shares for cell in share for cpu in cell.cpus]
    assert len(used) == len(set(used)) == count * (sum(sizes) // count)
    options = Options(guests=count, memory_mib=1024)
    for guest in guests_of(options, 0, cells):
        assert sum(split_memory(guest)) == 1024
        assert all(mib % 2 == 0 for mib in split_memory(guest))
        assert all(cells[cell.node].cpus[0] <= cpu for cell in guest.cells for cpu in cell.cpus)


def test_the_cores_of_this_machine_are_found() -> None:
    found = {cpu for cell in guests.cells_here() for cpu in cell.cpus}
    assert found == os.sched_getaffinity(0)


def test_guests_of_all_hosts_have_names_and_addresses_of_their_own() -> None:
    options = Options(hosts=3, guests=2, cpus=1)
    cells = parse_cells("0-1")
    found = [guest for n in range(3) for guest in guests_of(options, n, cells)]
    assert [g.address for g in found] == [f"10.78.0.{n}" for n in range(31, 37)]
    assert len({g.mac for g in found}) == len({g.name for g in found}) == 6
    assert [g.number for g in found] == list(range(6))
    told = settings(options, found[3], "a secret")
    assert "ROLE=node\nHEAD=10.78.0.31:6379\n" in told
    assert all(f"{g.address} {g.name}" in told for g in found)
    joining = settings(replace(options, head="10.78.0.99:6379"), found[0], "a secret")
    assert "ROLE=node\nHEAD=10.78.0.99:6379\n" in joining


def test_guests_know_the_hardware_addresses_of_all_others() -> None:
    options = Options(hosts=2, guests=2, cpus=1, static_arp=True)
    cells = parse_cells("0-1")
    found = [guest for n in range(2) for guest in guests_of(options, n, cells)]
    for guest in found:
        told = settings(options, guest, "")
        for other in found:
            assert (f"{other.address} {other.mac}" in told) == (other != guest)
    assert "ARP=" not in settings(Options(), found[0], "")


def test_settings_are_words_of_a_shell() -> None:
    options = Options(guests=2, cpus=1)
    guest = guests_of(options, 0, parse_cells("0-1"))[1]
    text = settings(options, guest, "$(touch /tmp/oh) 'x'")
    said = commands.output("sh", "-c", f'{text}\nprintf "%s|%s" "$TOKEN" "$NAME"')
    assert said == "$(touch /tmp/oh) 'x'|vc-0-1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--guests", "0"], "--guests 0: it must be at least 1"),
        (["--memory", "lots"], "--memory 'lots'"),
        (["--memory", "1025M"], "a multiple of 2"),
        (["--name", "My Cluster"], "--name 'My Cluster'"),
        (["--cells", "0-3;3"], "each core only once"),
        (["--cells", "all"], "as in 0-15;16-31"),
        (["--cells", "0-3", "--guests", "5"], "5 guests of 1 core do not fit"),
        (["--network", "10.78.0.0/29"], "do not fit into 10.78.0.0/29"),
        (["--network", "somewhere"], "somewhere"),
        (["--sriov", "fast", "--emulate"], "virtual functions need KVM"),
        (["--volume", "here"], "it must be an absolute path"),
        (["--volume", "/srv", "--volume-gib", "0"], "--volume-gib 0: it must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["virtual-cluster", "render", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("alchemist virtual-cluster render: ")
    assert said in told


def test_memory_is_read_with_its_unit() -> None:
    assert [parse_memory(text) for text in ("512M", "8G", "1TiB")] == [512, 8192, 1 << 20]


# --- hosts ----------------------------------------------------------------------------


def test_huge_pages_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    pages = tmp_path / "free_hugepages"
    pages.write_text("100\n")
    with pytest.raises(JobError, match=r"100 free huge pages .* 1024: .*nr_hugepages=1024"):
        cluster.check_pages(Options(guests=2, memory_mib=1024), pages)
    cluster.check_pages(Options(guests=2, memory_mib=1024, emulate=True), pages)
    cluster.check_pages(Options(guests=2, memory_mib=1024, huge_pages=False), pages)
    pages.write_text("1024\n")
    cluster.check_pages(Options(guests=2, memory_mib=1024), pages)


def test_a_volume_is_made_once_and_kept(tmp_path: Path) -> None:
    if not shutil.which("mke2fs"):
        pytest.skip("no mke2fs on this machine (apt-get install e2fsprogs)")
    options = Options(cpus=1, volume=str(tmp_path / "volumes"), volume_gib=1)
    (guest,) = guests_of(options, 0, parse_cells("0"))
    cluster.make_volume(options, guest)
    path = tmp_path / "volumes" / f"{guest.name}.img"
    assert path.stat().st_size == 1 << 30
    assert path.stat().st_blocks * 512 < 1 << 27  # sparse
    assert path.read_bytes()[1080:1082] == b"\x53\xef"  # the mark of ext4
    with open(path, "r+b") as file:
        file.write(b"the guest's")
    cluster.make_volume(options, guest)
    assert path.read_bytes()[:11] == b"the guest's"
    cluster.make_volume(Options(cpus=1), guest)  # none is asked for
    assert len(list(path.parent.iterdir())) == 1
    bad = Options(cpus=1, volume=str(tmp_path / "full"), volume_gib=1 << 40)
    with pytest.raises(JobError, match="mke2fs cannot make"):
        cluster.make_volume(bad, guest)
    assert list((tmp_path / "full").iterdir()) == []


def test_a_processor_without_virtualization_is_seen(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: vmx-like\nflags\t\t: fpu sse2 ht\n")
    assert not cluster.has_kvm(cpuinfo)
    cpuinfo.write_text("flags\t\t: fpu vme svm lahf_lm\n")
    assert cluster.has_kvm(cpuinfo) == os.access("/dev/kvm", os.R_OK | os.W_OK)


def test_what_guests_boot_from_is_packed_as_the_kernel_reads_it(tmp_path: Path) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox to unpack it with (apt-get install busybox-static)")
    packed = image.archive([("bin", None, 0o755), ("bin/x", b"hello", 0o750), ("y", b"", 0o644)])
    done = subprocess.run(
        [busybox, "cpio", "-i", "-d"], input=packed, cwd=tmp_path, capture_output=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bin/x").read_text() == "hello"
    assert stat.S_IMODE((tmp_path / "bin/x").stat().st_mode) == 0o750
    assert (tmp_path / "y").read_bytes() == b""


def test_what_is_missing_for_an_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no kernel in"):
        image.make(tmp_path, tmp_path, tmp_path / "out")
    (tmp_path / "boot").mkdir()
    (tmp_path / "boot" / "vmlinuz-6.1").touch()
    with pytest.raises(JobError, match=r"no modules of kernel 6\.1"):
        image.make(tmp_path, tmp_path, tmp_path / "out")
    with pytest.raises(JobError, match=r"no vmlinuz, initrd\.gz, root\.img in"):
        image.check(tmp_path)


def test_drivers_are_packed_after_those_that_they_need(tmp_path: Path) -> None:
    root, kernel, out = (tmp_path / name for name in ("root", "kernel", "out"))
    modules = kernel / "lib" / "modules" / "6.1"
    for folder in (modules / "kernel", kernel / "boot", root / "usr"):
        folder.mkdir(parents=True)
    (kernel / "boot" / "vmlinuz-6.1").write_bytes(b"kernel")
    needs = {"virtio": b"", "iavf": b"libie,auxiliary_bus", "libie": b"auxiliary-bus"}
    for name, needed in {**needs, "auxiliary-bus": b""}.items():
        text = b"\x7fELF\0license=GPL\0depends=" + needed + b"\0name=x\0"
        (modules / "kernel" / f"{name}.ko.xz").write_bytes(lzma.compress(text))
    with pytest.raises(JobError, match=r"no module absent in .*6\.1: --driver names a module"):
        image.make(root, kernel, out, Path("/bin/sh"), ["absent"])
    if not shutil.which("mke2fs"):
        pytest.skip("no mke2fs on this machine (apt-get install e2fsprogs)")
    image.make(root, kernel, out, Path("/bin/sh"), ["iavf"])
    packed = gzip.decompress((out / "initrd.gz").read_bytes())
    found = re.findall(rb"modules/\d\d-([\w-]+)\.ko\0", packed)
    assert found == [b"virtio", b"auxiliary-bus", b"libie", b"iavf"]


def test_the_scripts_of_guests_are_sound() -> None:
    for script in sorted(image.GUEST.glob("*.sh")):
        commands.output("sh", "-n", script)


def test_a_cluster_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cluster.HOME_VARIABLE, str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JobError, match="no cluster 'vc'"):
        cluster.down("vc")
    with pytest.raises(JobError, match="no cluster 'vc'"):
        cluster.up(Options(name="more"), "test:///default", 20.0, join="vc")
    running = tmp_path / "state" / "vc"
    running.mkdir(parents=True)
    (running / cluster.CLUSTER).write_text(json.dumps({"options": asdict(Options(guests=2))}))
    with pytest.raises(JobError, match=r"10\.78\.0\.32 belongs to a guest of cluster 'vc'"):
        cluster.up(Options(name="more", first=32), "test:///default", 20.0)
    shutil.rmtree(running)
    options = Options(image=str(tmp_path / "none"), memory_mib=256, emulate=True)
    with pytest.raises(JobError, match=r"no vmlinuz|no virsh"):
        cluster.up(options, "test:///default", limit_s=20.0)
    assert list(tmp_path.glob("state/*")) == []
    assert list(tmp_path.glob("alchemist-vc-*")) == []
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "2"}
    for name, value in {**job, "PATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="srun"):
        cluster.up(options, "test:///default", limit_s=20.0)
    assert list(tmp_path.glob("state/*")) == []


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case, options in CASES.items():
        (GOLDEN / f"{case}.txt").write_text(rendered(*options))
