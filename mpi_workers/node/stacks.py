"""Where a rank is, and where one has crashed: frames of C and of Python, innermost first.

Of a rank that runs they come from py-spy, which Ray brings along; of one that has crashed from the
file that it has written (`mpi_workers.rank.crashes`).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 2.0  # py-spy takes a quarter of a second
STACKS = 4  # different ones that a message shows
FRAMES = 12  # innermost ones that are shown
# The rank's own loop and ctypes, below the code of the library or the user.
LOOP = "/mpi_workers/"
HIDDEN = (LOOP, "/ali/", "/libffi.so", "_ctypes")
LAYER = "mpi_waits.so"  # under MPI: its functions have the names of MPI's
MPI_FUNCTION = re.compile(r"P?MPI_[A-Z]")
BELOW_MPI = re.compile(r"\((libc|libpthread|libuc|libfabric|\[vdso\])")  # and what MPI itself calls
INTERPRETER = re.compile(r"\((libffi|_ctypes|libpython|python)")  # what has called the C code
PYTHON_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<name>.+)$')
C_FRAME = re.compile(r"^(?P<path>/.+)\((?P<name>\w*)(?P<offset>\+0x[0-9a-f]+)?\) ?\[0x[0-9a-f]+\]$")
SYSTEM = ("/lib", "/usr/lib")  # stripped, large, and not what the user looks for
OF_HANDLER = 2  # innermost frames of a crash: the handler, and the kernel's way into it


def of_main_thread(pid: int) -> list[str]:
    """The innermost frames of a process's main thread, ``MPI_Recv (libmpi.so.12)`` first.

    Empty where py-spy is missing, or this process may not read the other (ptrace_scope, seccomp).
    """
    program = str(Path(sys.executable).with_name("py-spy"))
    command = [program, "dump", "--native", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False
        )
        threads: list[dict[str, Any]] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    main = [thread for thread in threads if thread.get("os_thread_id") == pid]
    return shown(main[0]["frames"]) if main else []


def shown(frames: list[dict[str, Any]]) -> list[str]:
    """Lines for frames of py-spy, innermost first, without those of the rank's loop."""
    lines: list[str] = []
    for frame in frames:
        path = frame.get("module") or frame.get("filename") or ""
        hidden = not path.endswith(LAYER) and any(part in path for part in HIDDEN)
        if hidden or frame["name"].startswith("0x"):
            if lines and LOOP in path:
                break  # the loop that has called what is above
            continue
        line = f":{frame['line']}" if frame.get("line") else ""
        lines.append(f"{frame['name']} ({os.path.basename(path)}{line})")
    return _from_mpi(lines)[:FRAMES]


def by_stack(stacks: Mapping[int, Sequence[str]]) -> list[str]:
    """``rank 1 is in MPI_Recv (libmpi.so) < solve (lib.c:12)``, a line for each stack.

    A stack of few ranks comes first: it is the cause more often than that of many.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(tuple(stacks[rank]), []).append(rank)
    by_rarity = sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    lines = [
        f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} in {' < '.join(stack)}"
        for stack, ranks in by_rarity[:STACKS]
    ]
    if len(groups) > STACKS:
        lines.append(f"other ranks have {len(groups) - STACKS} more stacks")
    return lines


def named(ranks: list[int], most: int = 8) -> str:
    """Ranks for a message: ``ranks 0, 2, 5`` or the first ones and how many more."""
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def _from_mpi(lines: list[str]) -> list[str]:
    """Frames without those inside of an MPI function, which differ from moment to moment."""
    outermost = 0
    for index, line in enumerate(lines):
        library = line.rpartition(" (")[2].removesuffix(")")
        inside = library.startswith(("libmpi", LAYER)) or BELOW_MPI.search(f"({library}")
        if MPI_FUNCTION.match(line):
            outermost = index
        elif not inside:
            break
    return lines[outermost:]


def crash_file(folder: str, rank: int) -> str:
    """The file for the frames of a rank's crash, in the gang's folder."""
    return f"{folder}/crash.{rank}"


def of_crash(folder: str, rank: int) -> list[str]:
    """The frames of a rank that has crashed, those of C first; empty if it has left none."""
    try:
        told = Path(crash_file(folder, rank)).read_text(errors="replace")
    except OSError:
        return []
    in_c = [match for line in told.splitlines() if (match := C_FRAME.match(line))][OF_HANDLER:]
    ours = list(itertools.takewhile(lambda one: not INTERPRETER.search(_c_frame(one)), in_c))
    # Of a caller the offset is that of its next instruction.
    places = [(one["path"], int(one["offset"] or "0", 16) - (i > 0)) for i, one in enumerate(ours)]
    found = _located([at for at, one in zip(places, ours, strict=True) if not one["name"]])
    frames = [
        {"name": match["name"], "line": match["line"], "filename": match["path"]}
        for line in told.splitlines()
        if (match := PYTHON_FRAME.match(line))
    ]
    named_c = [found.get(at) or _c_frame(one) for at, one in zip(places, ours, strict=True)]
    return [*named_c, *shown(frames)][:FRAMES]


def _c_frame(match: re.Match[str]) -> str:
    return f"{match['name'] or match['offset']} ({os.path.basename(match['path'])})"


def _located(frames: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Names and lines of frames for which the loader has no name: functions that are hidden.

    From binutils' addr2line, where it is installed; lines if the object was built with ``-g``.
    """
    found: dict[tuple[str, int], str] = {}
    for path in dict.fromkeys(path for path, _ in frames if not path.startswith(SYSTEM)):
        offsets = [offset for of, offset in frames if of == path]
        command = ["addr2line", "--functions", "--demangle", "--exe", path, *map(hex, offsets)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        lines = done.stdout.splitlines()
        for offset, name, place in zip(offsets, lines[::2], lines[1::2], strict=False):
            number = re.search(r":(\d+)", place.rpartition("/")[2] or place)
            if name != "??":
                where = os.path.basename(path) + (f":{number[1]}" if number else "")
                found[path, offset] = f"{name} ({where})"
    return found
