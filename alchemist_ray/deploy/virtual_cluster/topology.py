"""A host's cores by NUMA node, and their assignment to guests: one core per vCPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alchemist_ray.plural import counted

NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Cell:
    """Cores of one NUMA node."""

    node: int
    cpus: tuple[int, ...]


def parse_cpus(text: str) -> tuple[int, ...]:
    """Convert ``"0-3,8"`` to 0, 1, 2, 3, 8. Raises `ValueError`."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def format_cpus(cpus: Iterable[int]) -> str:
    """Convert 0, 1, 2, 3, 8 to ``"0-3,8"``."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def parse(text: str) -> tuple[Cell, ...]:
    """Cells of a host that is not this one: ``"0-15;16-31"``, a NUMA node after the other.

    Raises
    ------
    ValueError
        If it is not of that form, or a core is in two of them.
    """
    try:
        cells = tuple(Cell(i, parse_cpus(part)) for i, part in enumerate(text.split(";")))
    except ValueError:
        raise ValueError(f"{text!r}: write cores by NUMA node as in 0-15;16-31") from None
    cpus = [cpu for cell in cells for cpu in cell.cpus]
    if not cpus or len(set(cpus)) < len(cpus):
        raise ValueError(f"{text!r}: give at least one core, and each core only once")
    return cells


def here(nodes: Path = NODES) -> tuple[Cell, ...]:
    """Return the cores that this process may use by NUMA node: in a job, the job's."""
    usable = os.sched_getaffinity(0)
    cells = []
    for path in sorted(nodes.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        there = parse_cpus((path / "cpulist").read_text())
        if cpus := tuple(cpu for cpu in there if cpu in usable):
            cells.append(Cell(int(path.name[4:]), cpus))
    return tuple(cells) or (Cell(0, tuple(sorted(usable))),)


def shares(cells: Sequence[Cell], guests: int, cpus: int | None) -> list[tuple[Cell, ...]]:
    """Return the cores of each guest: equally many, in order, so that few guests span NUMA nodes.

    Parameters
    ----------
    cells : sequence of Cell
    guests : int
    cpus : int, optional
        Cores of each. Default: all, evenly.

    Raises
    ------
    ValueError
        If there are fewer.
    """
    every = [(cell.node, cpu) for cell in cells for cpu in cell.cpus]
    each = len(every) // guests if cpus is None else cpus
    if each < 1 or each * guests > len(every):
        raise ValueError(
            f"{counted(guests, 'guest')} of {counted(max(each, 1), 'core')} do not fit on a host "
            f"with {len(every)}: use fewer guests or cores; vCPUs do not share cores"
        )
    found = []
    for guest in range(guests):
        mine = every[guest * each : (guest + 1) * each]
        nodes = list(dict.fromkeys(node for node, _ in mine))
        found.append(tuple(Cell(node, tuple(c for n, c in mine if n == node)) for node in nodes))
    return found
