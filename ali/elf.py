"""Which shared objects an ELF file needs, and which files the loader takes for them.

Follows ld.so(8): RPATH, LD_LIBRARY_PATH, RUNPATH, the cache of ldconfig, the default folders.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"\x7fELF\x02\x01"  # 64-bit, little-endian
HEADER, SEGMENT, ENTRY = 64, 56, 16  # sizes of ELF's structures in bytes
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NEEDED, DT_STRTAB, DT_RPATH, DT_RUNPATH = 1, 5, 15, 29
CACHE, CACHE_MAGIC = Path("/etc/ld.so.cache"), b"glibc-ld.so.cache1.1"
DEFAULT_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")


@dataclass(frozen=True, slots=True)
class Needs:
    """The dynamic section of a shared object, as far as it names others."""

    names: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()  # folders, with $ORIGIN replaced
    runpath: tuple[str, ...] = ()
    machine: int = -1


def needs(file: Path) -> Needs:
    """The names that a file needs; nothing for a file that the loader would refuse."""
    try:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            return _parsed(text, str(file.resolve().parent))
    except (OSError, ValueError, OverflowError, struct.error):  # ValueError: an empty file
        return Needs()


def _parsed(text: mmap.mmap, origin: str) -> Needs:
    if text[: len(MAGIC)] != MAGIC:
        return Needs()
    (machine,) = struct.unpack_from("<H", text, 18)
    (first,) = struct.unpack_from("<Q", text, 32)
    (count,) = struct.unpack_from("<H", text, 56)
    segments = [struct.unpack_from("<IIQQQQ", text, first + i * SEGMENT) for i in range(count)]
    entries: list[tuple[int, int]] = []
    for kind, _, offset, _, _, nbytes in segments:
        if kind == PT_DYNAMIC:
            entries = list(
                struct.iter_unpack("<qQ", text[offset : offset + nbytes // ENTRY * ENTRY])
            )
    strings = next((value for tag, value in entries if tag == DT_STRTAB), 0)
    for kind, _, offset, address, _, nbytes in segments:
        if kind == PT_LOAD and address <= strings < address + nbytes:
            strings += offset - address
            break

    def named(wanted: int) -> Iterator[str]:
        for tag, value in entries:
            if tag == wanted:
                start = strings + value
                yield os.fsdecode(text[start : text.find(b"\0", start)])

    def folders(wanted: int) -> tuple[str, ...]:
        found = [folder for value in named(wanted) for folder in value.split(":") if folder]
        return tuple(f.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for f in found)

    runpath = folders(DT_RUNPATH)
    return Needs(tuple(named(DT_NEEDED)), () if runpath else folders(DT_RPATH), runpath, machine)


def chains(file: Path) -> Iterator[tuple[str, ...]]:
    """The names that a file needs, directly and indirectly.

    Each is the last of a tuple, after the names that lead to it. A name that the loader would not
    find is given, but not followed.
    """
    return (chain for chain, _ in searched(file))


def searched(file: Path) -> Iterator[tuple[tuple[str, ...], Path | None]]:
    """The tuples of `chains`, each with the file that the loader takes for its last name."""
    own = needs(file)
    queue: list[tuple[tuple[str, ...], Needs, tuple[str, ...]]] = [((), own, own.rpath)]
    seen: set[str] = set()
    while queue:
        chain, about, inherited = queue.pop(0)
        for name in about.names:
            if name in seen:
                continue
            seen.add(name)
            found = _located(name, about, inherited)
            yield (*chain, name), found
            if found is not None:
                below = needs(found)
                queue.append(((*chain, name), below, (*below.rpath, *inherited)))


def _located(name: str, about: Needs, inherited: tuple[str, ...]) -> Path | None:
    """The file that the loader takes for a name in an object's dynamic section."""
    if "/" in name:
        return Path(name)
    variable = [f for f in os.environ.get("LD_LIBRARY_PATH", "").split(":") if f]
    before = () if about.runpath else inherited
    for folder in (*before, *variable, *about.runpath):
        if _fits(Path(folder, name), about.machine):
            return Path(folder, name)
    cached = _cache().get(name, [])
    for path in (*cached, *(f"{folder}/{name}" for folder in DEFAULT_FOLDERS)):
        if _fits(Path(path), about.machine):
            return Path(path)
    return None


def _fits(path: Path, machine: int) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(20)
    except OSError:
        return False
    return head.startswith(MAGIC) and head[18:] == struct.pack("<H", machine)


@functools.cache
def _cache() -> dict[str, list[str]]:
    """Paths by name, from the cache of ldconfig; empty where it has another format."""
    found: dict[str, list[str]] = {}
    try:
        text = CACHE.read_bytes()
        if text.startswith(CACHE_MAGIC):
            (count,) = struct.unpack_from("<I", text, 20)
            for _, key, value, _, _ in struct.iter_unpack("<iIIIQ", text[48 : 48 + 24 * count]):
                name, path = (os.fsdecode(text[at : text.index(b"\0", at)]) for at in (key, value))
                found.setdefault(name, []).append(path)
    except (OSError, ValueError, struct.error):
        return {}
    return found
