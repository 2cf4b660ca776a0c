"""What has to be said for a library to load well: MPI's second name, who belongs together.

MPICH's ABI (libmpi.so.12) is what the mpich wheel, Intel MPI and Cray's ABI build
provide. Debian calls the same library libmpich.so.12, and what is built there asks
the loader for that name: it would bring in a second MPI. And MKL's parts need each
other, in a circle, with no word of it in their files.

Both are said with a shared object that has no code, only a name of its own and a list of others
that it needs, loaded from a memfd. The loader takes a library that has a soname for the one
that is asked for, and resolves what it loads together among itself. No folder has to be made
that somebody removes, no environment set before the process starts, and nothing
is left behind however it ends.

OpenBLAS looks at the processor when it is loaded, and is told what it may not know.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

LOADED = "libmpi.so.12"
WANTED = "libmpich.so.12"

CORE_TYPE = "OPENBLAS_CORETYPE"
CORES = {
    "SKYLAKEX": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"},
    "HASWELL": {"avx2", "fma"},
}

ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
HEADER, SEGMENT, ENTRY, SYMBOL = 64, 56, 16, 24  # sizes of ELF's structures
PAGE = 0x10000  # 64 KiB: no kernel has larger pages
READ_WRITE = 6
DT_NEEDED, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 1, 5, 6, 10, 11, 14
PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
ET_DYN = 3


def provide_mpich() -> bool:
    """Give the MPI of this process its second name; whether it has it now.

    Does nothing where it has it already, or where no `LOADED` is loaded (a site's own MPI).
    """
    if _is_loaded(WANTED):
        return True
    if not _is_loaded(LOADED):
        return False
    try:
        _load(shared_object(WANTED, [LOADED]), ctypes.RTLD_LOCAL)
    except OSError:  # another loader than glibc's, a kernel that runs nothing from a memfd
        return False
    return True


def load_together(files: Sequence[str]) -> ctypes.CDLL:
    """Libraries that need each other; the result has the functions of all of them.

    Their symbols become global: what they load by themselves later, such as MKL's
    code for this processor, needs them.

    Raises
    ------
    OSError
        With the loader's words.
    """
    return _load(shared_object("alchemist-together", files), ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def known_processor() -> Iterator[None]:
    """Tell an OpenBLAS that is loaded meanwhile what this processor can do.

    One that is older than the processor does not know its model, and takes it for
    one of 2004: Debian 12's made 16 instead of 75 GF/s so. A choice of the user's stays.
    """
    core = _core(Path("/proc/cpuinfo"))
    if core is None or CORE_TYPE in os.environ:
        yield
        return
    os.environ[CORE_TYPE] = core
    try:
        yield
    finally:
        del os.environ[CORE_TYPE]


def _core(cpuinfo: Path) -> str | None:
    """OpenBLAS's name for what all its kernels for such a processor need; None if unknown."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.split())
                return next((core for core, need in CORES.items() if need <= flags), None)
    return None


def _is_loaded(soname: str) -> bool:
    try:
        ctypes.CDLL(soname, os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def _load(content: bytes, mode: int) -> ctypes.CDLL:
    # Kept open: the loader knows what it has loaded by its path, which must not be another's.
    fd = os.memfd_create("alchemist", os.MFD_CLOEXEC)
    os.write(fd, content)
    return ctypes.CDLL(f"/proc/self/fd/{fd}", mode=mode)


def shared_object(soname: str, needed: Sequence[str], like: Path = Path("/proc/self/exe")) -> bytes:
    """An ELF file without code or symbols that needs others, for the machine that `like` is for.

    Raises
    ------
    OSError
        If this is not Linux with glibc on a 64-bit, little-endian machine.
    """
    if platform.libc_ver()[0] != "glibc":
        raise OSError("the system's loader is not glibc's")
    with like.open("rb") as file:
        header = file.read(HEADER)
    if header[:6] != ELF64_LITTLE_ENDIAN:
        raise OSError(f"{like} is not for a 64-bit, little-endian machine")
    machine, flags = (
        struct.unpack_from("<H", header, 18)[0],
        struct.unpack_from("<I", header, 48)[0],
    )

    names, offsets = b"\0", []
    for name in (soname, *needed):
        offsets.append(len(names))
        names += os.fsencode(name) + b"\0"
    dynamic_at = HEADER + 3 * SEGMENT
    dynamic_nbytes = (len(offsets) + 5) * ENTRY
    symbols_at = dynamic_at + dynamic_nbytes
    names_at = symbols_at + SYMBOL  # the one symbol that must be: none
    nbytes = names_at + len(names)
    new_header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        ELF64_LITTLE_ENDIAN + b"\x01", ET_DYN, machine, 1, 0, HEADER, 0, flags,
        HEADER, SEGMENT, 3, 64, 0, 0,
    )  # fmt: skip
    segments = [
        (PT_LOAD, READ_WRITE, 0, 0, 0, nbytes, nbytes, PAGE),
        (PT_DYNAMIC, READ_WRITE, *(dynamic_at,) * 3, dynamic_nbytes, dynamic_nbytes, 8),
        (PT_GNU_STACK, READ_WRITE, 0, 0, 0, 0, 0, 16),  # without it stacks become executable
    ]
    entries = [
        *((DT_NEEDED, offset) for offset in offsets[1:]), (DT_SONAME, offsets[0]),
        (DT_STRTAB, names_at), (DT_STRSZ, len(names)), (DT_SYMTAB, symbols_at),
        (DT_SYMENT, SYMBOL), (0, 0),
    ]  # fmt: skip
    return b"".join(
        [
            new_header,
            *(struct.pack("<IIQQQQQQ", *segment) for segment in segments),
            *(struct.pack("<qQ", *entry) for entry in entries),
            bytes(SYMBOL),
            names,
        ]
    )
