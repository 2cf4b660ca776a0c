"""The three files that guests boot from, made from a container's files and a kernel package.

Guests need nothing of the network to start, and no cloud-init: the initrd has a static busybox,
the kernel's virtio drivers and `guest/*.sh`.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from alchemist_ray.errors import JobError

GUEST = Path(__file__).with_name("guest")
BUSYBOX = Path("/bin/busybox")
DRIVERS = (
    "virtio", "virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci",
    "failover", "net_failover", "virtio_net", "virtio_blk", "virtio-rng", "overlay", "qemu_fw_cfg",
    "crc16", "crc32c_generic", "libcrc32c", "mbcache", "jbd2", "ext4",
)  # fmt: skip
SPARE = 64 << 20
MAKE_S = 900.0
FILES = ("vmlinuz", "initrd.gz", "root.img")


def make(
    root: Path, kernel: Path, out: Path, busybox: Path = BUSYBOX, drivers: Sequence[str] = ()
) -> None:
    """Write `vmlinuz`, `initrd.gz` and `root.img` into a folder.

    Parameters
    ----------
    root : Path
        The files of an image with alchemist-on-ray in it: an unpacked container.
    kernel : Path
        Where a kernel package is unpacked, or ``/``: has ``boot/vmlinuz-*`` and ``lib/modules``.
    out : Path
        Made if it is not there.
    busybox : Path
        A static one (Debian: busybox-static).
    drivers : sequence of str
        Modules besides virtio's; those that they need are added.

    Raises
    ------
    JobError
        If something is missing; says what.
    """
    kernels = sorted((kernel / "boot").glob("vmlinuz-*"))
    if not kernels:
        raise JobError(
            f"no kernel in {kernel / 'boot'}: unpack one there (`apt-get download` of Debian's "
            "linux-image-cloud-amd64 and `dpkg-deb -x`), or name / for this machine's own"
        )
    version = kernels[-1].name.removeprefix("vmlinuz-")
    modules = kernel / "lib" / "modules" / version
    if not modules.is_dir():
        raise JobError(f"no modules of kernel {version}: there is no folder {modules}")
    if not busybox.is_file():
        raise JobError(f"no {busybox}: `apt-get install busybox-static`, or --busybox")
    if not (root / "usr").is_dir():
        raise JobError(f"{root} has no /usr: it must contain the unpacked files of an image")
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(kernels[-1], out / "vmlinuz")
    entries = [("bin", None, 0o755), ("bin/busybox", busybox.read_bytes(), 0o755)]
    entries += [("init", (GUEST / "init.sh").read_bytes(), 0o755)]
    entries += [("start.sh", (GUEST / "start.sh").read_bytes(), 0o644), ("modules", None, 0o755)]
    entries += [(f"modules/{name}.ko", text, 0o644) for name, text in _drivers(modules, drivers)]
    (out / "initrd.gz").write_bytes(gzip.compress(archive(entries), 6, mtime=0))
    _root_image(root, out / "root.img")


def _drivers(modules: Path, more: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield this kernel's drivers, uncompressed, roughly in the order of their dependencies."""
    found = {path.name.partition(".")[0]: path for path in modules.rglob("*.ko*")}
    missing = [name for name in more if name not in found]
    if missing:
        raise JobError(f"no module {', '.join(missing)} in {modules}: --driver names a module")
    names = [name for name in DRIVERS if name in found]
    for name in more:
        names += [n for n in _needed(found, name) if n not in names]
    for number, name in enumerate(names):
        yield f"{number:02}-{name}", _module(found[name])


def _module(path: Path) -> bytes:
    text = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(text)
    if path.suffix == ".gz":
        return gzip.decompress(text)
    if path.suffix != ".ko":
        raise JobError(f"{path}: uncompress it first; only .ko, .ko.xz and .ko.gz are read")
    return text


def _needed(found: Mapping[str, Path], driver: str) -> list[str]:
    """A driver after the modules that it needs; their names have - or _ alike."""
    names = {name.replace("-", "_"): name for name in found}
    listed = re.search(rb"\0depends=([\w,-]*)\0", _module(found[driver]))
    needed = listed[1].decode().replace("-", "_").split(",") if listed else []
    order = [n for name in needed if name in names for n in _needed(found, names[name])]
    return [*dict.fromkeys(order), driver]


def archive(entries: list[tuple[str, bytes | None, int]]) -> bytes:
    """Return a cpio archive ("newc") of names, contents (None: a folder) and modes."""
    parts = []
    for number, (name, content, mode) in enumerate([*entries, ("TRAILER!!!", b"", 0)], 1):
        kind = stat.S_IFDIR if content is None else stat.S_IFREG
        data = content or b""
        path = name.encode() + b"\0"
        fields = (number, kind | mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        header = b"070701" + b"".join(b"%08x" % field for field in fields) + path
        parts += [header, bytes(-len(header) % 4), data, bytes(-len(data) % 4)]
    return b"".join(parts)


def _root_image(root: Path, image: Path) -> None:
    """Make an ext4 file system of the files, without a journal: it is read-only."""
    nbytes = sum(
        path.lstat().st_size + 4096
        for folder, _, names in os.walk(root)
        for path in (Path(folder) / name for name in names)
    )
    size = -(-int(nbytes * 1.1 + SPARE) >> 20)
    make_ext4(image, f"{size}M", "-O", "^has_journal", "-m", "0", "-d", root)


def make_ext4(path: Path, size: str, *options: str | Path) -> None:
    """Make a file with an ext4 file system that root owns. Raises `JobError`."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    words = ["mke2fs", "-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", *options, new, size]
    done = subprocess.run(words, capture_output=True, text=True, timeout=MAKE_S, check=False)
    if done.returncode:
        new.unlink(missing_ok=True)
        said = done.stderr.strip()[-500:]
        raise JobError(f"mke2fs cannot make {path} on {os.uname().nodename}: {said}")
    new.rename(path)


def check(folder: Path) -> None:
    """Check that the three files exist. Raises `JobError`."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise JobError(
            f"no {', '.join(missing)} in {folder} on {os.uname().nodename}: `alchemist "
            "virtual-cluster image` makes them; --image names the folder"
        )
