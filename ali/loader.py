"""Shared objects: which files they need, and how they are loaded. Does not load MPI.

The mpich wheel, Intel MPI and Cray's ABI build provide MPICH's ABI as libmpi.so.12. Debian names
the same library libmpich.so.12, and libraries built there ask the loader for that name: it would
load a second MPI. The parts of MKL need each other in a circle, which their files do not declare.

Both are solved with a shared object without code, which has a soname and a list of needed
libraries, loaded from a memfd. The loader identifies libraries by soname, and resolves symbols of
libraries that are loaded together among them. This needs no folder, no environment variable set
before the process starts, and leaves nothing behind.

OpenBLAS chooses its kernels when it is loaded; `known_processor` names a processor that an older
OpenBLAS does not recognise.

The loader itself tells which files an object needs, as for ldd, and with ``LD_DEBUG=files``: it
maps the files and runs none of their code. So RPATH, RUNPATH, LD_LIBRARY_PATH and the cache of
ldconfig count as they do when the file is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import struct
import subprocess
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from pathlib import Path

LOADED = "libmpi.so.12"
WANTED = "libmpich.so.12"

CORE_TYPE = "OPENBLAS_CORETYPE"
CORES = {
    "SKYLAKEX": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"},
    "HASWELL": {"avx2", "fma"},
}

MAGIC = b"\x7fELF\x02\x01"  # 64-bit, little-endian
HEADER, SEGMENT, ENTRY, SYMBOL = 64, 56, 16, 24  # sizes of ELF's structures in bytes
MOST_PAGE_NBYTES = 0x10000  # 64 KiB: no kernel has larger pages
READ_WRITE = 6
DT_NEEDED, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 1, 5, 6, 10, 11, 14
PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
ET_DYN = 3


def provide_mpich() -> bool:
    """Give the MPI of this process its second name; whether it has that name now.

    Does nothing if it has the name already, or if no `LOADED` is loaded (a site's own MPI).
    """
    if _is_loaded(WANTED):
        return True
    if not _is_loaded(LOADED):
        return False
    try:
        _load(shared_object(WANTED, [LOADED]), ctypes.RTLD_LOCAL)
    except OSError:  # another loader than glibc's, or a kernel that forbids code from a memfd
        return False
    return True


def load_together(files: Sequence[str]) -> ctypes.CDLL:
    """Load libraries that need each other; the result has the functions of all of them.

    Their symbols become global, because libraries that they load later, such as MKL's code for
    this processor, need them.

    Raises
    ------
    OSError
        With the loader's message.
    """
    return _load(shared_object("alchemist-together", files), ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def known_processor() -> Iterator[None]:
    """Set OPENBLAS_CORETYPE for an OpenBLAS that is loaded inside the block.

    An OpenBLAS older than the processor selects kernels for a processor of 2004: Debian 12's
    reached 16 instead of 75 GF/s. A value set by the user is kept.
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
    """OpenBLAS's name for a processor whose kernels this one can run; None if unknown."""
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
    # Kept open: the loader identifies files by path, so the descriptor must not be reused.
    fd = os.memfd_create("alchemist", os.MFD_CLOEXEC)
    os.write(fd, content)
    # Not /proc/self: gdb would open its own descriptor of that number, and wait for it for ever.
    return ctypes.CDLL(f"/proc/{os.getpid()}/fd/{fd}", mode=mode)


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def symbol_file(library: ctypes.CDLL, symbol: str) -> str | None:
    """The file in which a library, or a library that it needs, finds a symbol; None if absent."""
    try:
        address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p)
    except AttributeError:
        return None
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SymbolInfo)]
    about = _SymbolInfo()
    return os.path.realpath(about.file.decode()) if dladdr(address, about) else None


def shared_object(soname: str, needed: Sequence[str], like: Path = Path("/proc/self/exe")) -> bytes:
    """An ELF file without code or symbols that needs others, for the machine of the file `like`.

    Raises
    ------
    OSError
        If this is not Linux with glibc on a 64-bit, little-endian machine.
    """
    if platform.libc_ver()[0] != "glibc":
        raise OSError("the system's loader is not glibc's")
    with like.open("rb") as file:
        header = file.read(HEADER)
    if header[:6] != MAGIC:
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
    names_at = symbols_at + SYMBOL  # the mandatory null symbol
    nbytes = names_at + len(names)
    new_header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        MAGIC + b"\x01", ET_DYN, machine, 1, 0, HEADER, 0, flags,
        HEADER, SEGMENT, 3, 64, 0, 0,
    )  # fmt: skip
    segments = [
        (PT_LOAD, READ_WRITE, 0, 0, 0, nbytes, nbytes, MOST_PAGE_NBYTES),
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


LOADER = re.compile(r"ld(64|-linux[\w-]*|-[\d.]+)\.so[\d.]*")
NEEDED = re.compile(r"\s*\d+:\s+file=(\S+) \[\d+\];  needed by (.+) \[\d+\]")
FOUND = re.compile(r"\s*(\S+) => (/.+) \(0x[0-9a-f]+\)")
LIMIT_S = 60.0  # a file system that does not answer


def chains(file: Path) -> Iterator[tuple[str, ...]]:
    """The names that a file needs, directly and indirectly.

    Each is the last of a tuple, after the names that lead to it. A name that the loader would not
    find is given, but not followed.
    """
    return (chain for chain, _ in searched(file))


def searched(file: Path) -> Iterator[tuple[tuple[str, ...], Path | None]]:
    """The tuples of `chains`, each with the file that the loader takes for its last name.

    Nothing for a file that the loader would refuse, or where the loader is not glibc's.
    """
    loader = next((path for path in mapped_files() if LOADER.fullmatch(Path(path).name)), None)
    if loader is None:
        return
    kept = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    answer = subprocess.run(
        [loader, str(file.resolve())],
        env=kept | {"LD_TRACE_LOADED_OBJECTS": "1", "LD_DEBUG": "files"},
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    lines = os.fsdecode(answer.stdout + answer.stderr).splitlines()
    found = {m[1]: m[2] for m in map(FOUND.fullmatch, lines) if m}
    below: dict[str, tuple[str, ...]] = {str(file.resolve()): ()}  # by file: names that lead to it
    for name, needer in (m.groups() for m in map(NEEDED.fullmatch, lines) if m):
        chain = (*below.get(needer, ()), name)
        path = found.get(name, name if name.startswith("/") else None)
        below[path or name] = chain
        yield chain, None if path is None else Path(path)


MPI_NAME = re.compile(r"(libmpi[\w+-]*)\.so\.(\d+)")
OPEN_MPI_VERSIONS = (0, 1, 20, 40)  # libmpi.so.N of Open MPI; MPICH's ABI is 12


def mpi_file() -> str:
    """The file of the MPI that is loaded."""
    return next(
        (path for path in mapped_files() if re.match(r"libmpi(ch)?(_\w+)?\.so", Path(path).name)),
        "libmpi.so.12",
    )


# Of packages that look for an MPI library by a name of their own: their variable for its file.
# NEURON's wheels, without it, are 1 process of 1 on each rank (its src/nrnmpi/nrnmpi_dynam.cpp).
MPI_FILE_VARIABLES = ("MPI_LIB_NRN_PATH",)


def set_mpi_variables(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables by which packages find the MPI of this process, and its ``mpicc``.

    The folder of its programs comes first in PATH: codes that compile at run time take the first
    ``mpicc``, and without an activated environment that is another MPI's. Other variables that are
    set are kept.
    """
    file = mpi_file()
    for name in MPI_FILE_VARIABLES:
        env.setdefault(name, file)
    programs = Path(file).parent.parent / "bin"
    path = env.get("PATH", os.defpath).split(os.pathsep)
    if (programs / "mpicc").exists():
        others = [folder for folder in path if folder != str(programs)]
        env["PATH"] = os.pathsep.join([str(programs), *others])


def mapped_files() -> Iterable[str]:
    """Shared objects in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return dict.fromkeys(line.split()[-1] for line in lines if "/" in line and ".so" in line)
