"""Modules that a thin client lacks: Ray, MPI, and those that only POSIX systems have."""

from __future__ import annotations

NOT_ON_CLIENTS = (
    "ray", "mpi4py", "uvloop", "threadpoolctl", "tqdm", "scipy", "yaml",
    "fcntl", "resource", "pwd", "grp", "termios",
)  # fmt: skip
