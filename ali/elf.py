"""Which shared objects an ELF file needs, and which files the loader takes for them.

The loader itself is asked, as by ldd, and with ``LD_DEBUG=files``: it maps the files and runs none
of their code. So RPATH, RUNPATH, LD_LIBRARY_PATH and the cache of ldconfig count as they do when
the file is loaded.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ali.mpi_files import mapped_files

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
    below: dict[str, tuple[str, ...]] = {
        str(file.resolve()): ()
    }  # by file: the names that lead to it
    for name, needer in (m.groups() for m in map(NEEDED.fullmatch, lines) if m):
        chain = (*below.get(needer, ()), name)
        path = found.get(name, name if name.startswith("/") else None)
        below[path or name] = chain
        yield chain, None if path is None else Path(path)
