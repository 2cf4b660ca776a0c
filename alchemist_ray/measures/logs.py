"""Log files of gangs, below Ray's session folder on each node: ``logs/alchemist/GANG/``."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import ray
import ray._private.worker

from mpi_workers.node.rank_output import FILE_LIMIT, make_folder

LEVEL = "ALCHEMIST_LOG_LEVEL"  # debug, info, warning, ...; default: info
FORMAT = "ALCHEMIST_LOG_FORMAT"  # "json": a map in each line
PACKAGE = "alchemist_ray"  # the logger of all of its modules
MANAGER = "manager.log"
READ_LIMIT = 1 << 20  # 1 MiB of a file in one answer


@dataclass(frozen=True, slots=True)
class NodeLog:
    """New lines of a gang's log files on one node.

    Attributes
    ----------
    folder : str
        Name of the gang's folder.
    made : float
        When it was made, in seconds since the epoch.
    lines : dict of str to list of str
        By file.
    positions : dict of str to int
        Where to continue, by file.
    """

    folder: str
    made: float
    lines: dict[str, list[str]]
    positions: dict[str, int]


def log_settings(env: Mapping[str, str]) -> dict[str, str]:
    """The settings of logs: in an environment, and the level of this program's own logger."""
    found = {name: env[name] for name in (LEVEL, FORMAT) if name in env}
    if level := logging.getLogger(PACKAGE).level:
        found[LEVEL] = logging.getLevelName(level)
    return found


def folder_name(gang: str, ident: str) -> str:
    """The name of a gang's folder, the same on all nodes and in all incarnations."""
    name = re.sub(r"[^\w.-]", "_", gang)
    return name if gang == ident else f"{name}.{ident}"


def folder(name: str) -> Path:
    """The path of a gang's folder on this node. Processes of the Ray cluster only."""
    return _all_folders() / name


def _all_folders() -> Path:
    node: Any = ray._private.worker._global_node  # Ray's API tells no worker its session folder
    return Path(node.get_logs_dir_path()) / "alchemist"


def read(gang: str, since: dict[str, int]) -> NodeLog | None:
    """Lines of the newest gang of a name, or with an id; None if there are no files of it."""
    found = [
        path
        for path in _all_folders().glob("*")
        if path.name == gang or re.fullmatch(rf"{re.escape(gang)}\.g[0-9a-f]+", path.name)
    ]
    if not found:
        return None
    newest = max(found, key=lambda path: path.stat().st_mtime)
    lines: dict[str, list[str]] = {}
    positions = {}
    for path in sorted(newest.glob("*.log")):
        lines[path.name], positions[path.name] = _after(path, since.get(path.name, -1))
    return NodeLog(newest.name, newest.stat().st_mtime, lines, positions)


def _after(path: Path, position: int) -> tuple[list[str], int]:
    """Whole lines of a file after a position; of its last part at first (-1)."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        first = position < 0
        start = max(0, end - READ_LIMIT) if first else position
        if start > end:  # another file began
            start = 0
        file.seek(start)
        data = file.read(READ_LIMIT)
    data = data[: data.rfind(b"\n") + 1]
    text = data.decode(errors="replace").splitlines()
    if first and start > 0:
        text = text[1:]
    return text, start + len(data)


class JsonFormatter(logging.Formatter):
    """A record as a JSON map: time, level, logger, message."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def write_to(name: str, settings: dict[str, str]) -> logging.Handler | None:
    """Write what a GroupManager logs to its gang's folder; None if it cannot be.

    Lines whose attribute `gang` names another folder are left out.
    """
    path = folder(name) / MANAGER
    try:
        make_folder(path.parent)
        handler = RotatingFileHandler(path, maxBytes=FILE_LIMIT, backupCount=1, delay=True)
    except OSError:
        return None
    text = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
    formatter = logging.Formatter(text, "%Y-%m-%d %H:%M:%S")
    if settings.get(FORMAT) == "json":
        formatter = JsonFormatter()
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.addFilter(lambda record: getattr(record, "gang", name) == name)
    package = logging.getLogger(PACKAGE)
    package.addHandler(handler)
    level = settings.get(LEVEL, "info").upper()
    package.setLevel(level if level in logging.getLevelNamesMapping() else logging.INFO)
    return handler


def close(handler: logging.Handler | None) -> None:
    """End what `write_to` began."""
    if handler is not None:
        logging.getLogger(PACKAGE).removeHandler(handler)
        handler.close()
