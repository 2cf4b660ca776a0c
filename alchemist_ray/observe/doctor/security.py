"""Checks of a node's security: open ports, files with secrets, other users' Ray, ptrace."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import stat
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from alchemist_ray.deploy.slurm.allocation import other_users
from alchemist_ray.observe.doctor.finding import INFO, OK, WARN, Expected, Finding
from alchemist_ray.runtime.cluster.batch_job import job_id

TOKEN = Path("~/.ray/auth_token")
LISTEN = "0A"  # a state in /proc/net/tcp
OURS = re.compile(r"\bray\b|\bray::|raylet|gcs_server|mpi_workers|alchemist")
DAEMONS = ("raylet", "gcs_server")
SESSION = re.compile(r"(/[^\s=]*/session_[^/\s]+)")
SHOWN = 12


def token_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the file with Ray's token."""
    return Path(env.get("RAY_AUTH_TOKEN_PATH") or TOKEN).expanduser()


def auth_mode() -> str:
    """Return Ray's authentication mode, ``token`` or ``disabled``."""
    return os.environ.get("RAY_AUTH_MODE") or ("token" if token_path().is_file() else "disabled")


@dataclass(frozen=True, slots=True)
class OpenPort:
    """A TCP port at which a process listens."""

    address: str
    port: int
    inode: str

    @property
    def is_local(self) -> bool:
        return self.address.startswith("127.") or self.address in ("::1", "::ffff:127.0.0.1")


def open_tcp_ports(uid: int) -> list[OpenPort]:
    """Return the ports at which processes of a user listen."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):  # no IPv6
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[7]) == uid:
                    address, port = fields[1].split(":")
                    words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                    raw = struct.pack(f"={len(words)}I", *words)
                    ip = socket.inet_ntop(family, raw)
                    found.append(OpenPort(ip, int(port, 16), fields[9]))
    return found


def _processes() -> Iterator[tuple[Path, int, str]]:
    """Yield folder, user and command line of every process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                raw = (folder / "cmdline").read_bytes()
                command = raw.replace(b"\0", b" ").decode(errors="replace")
                yield folder, folder.stat().st_uid, command


def _name(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "comm").read_text().strip()
    return "?"


def open_ports(expected: Expected) -> Iterator[Finding]:
    """Check which ports of Ray and gangs can be reached from other machines."""
    check = "open ports"
    reachable = {p.inode: p for p in open_tcp_ports(os.geteuid()) if not p.is_local}
    by_process: dict[str, set[str]] = defaultdict(set)
    for folder, uid, command in _processes():
        if uid != os.geteuid() or not OURS.search(command):
            continue
        with contextlib.suppress(OSError):
            for fd in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = os.readlink(fd).removeprefix("socket:[").rstrip("]")
                    if (port := reachable.get(inode)) is not None:
                        by_process[_name(folder)].add(_described(port))
    if not by_process:
        yield Finding(check, OK, "Ray and gangs can be reached from this machine only")
        return
    shown = [f"{name} {', '.join(sorted(ports))}" for name, ports in sorted(by_process.items())]
    more = f" and {len(shown) - SHOWN} more processes" if len(shown) > SHOWN else ""
    text = f"reachable from other machines: {'; '.join(shown[:SHOWN])}{more}"
    if auth_mode() == "token":
        yield Finding(
            check, INFO,
            f"{text}. Ray's ports require its token (metrics do not), gangs' ports the gang's "
            "token; MPI's own ports of gangs on several nodes require none",
        )  # fmt: skip
    else:
        yield Finding(
            check, WARN, f"{text}. Ray requires no token",
            "set RAY_AUTH_MODE=token before Ray starts, start Ray at 127.0.0.1 "
            "(--node-ip-address) on a single machine, or close the ports with a firewall",
        )  # fmt: skip


def _described(port: OpenPort) -> str:
    everywhere = port.address in ("0.0.0.0", "::")
    return f"*:{port.port}" if everywhere else f"{port.address}:{port.port}"


def is_private(path: Path) -> bool:
    """Return whether only this user (and root) can reach a path: one of its folders is closed."""
    for folder in (path, *path.parents):
        about = folder.stat()
        if about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077:
            return True
    return False


def token_files(expected: Expected) -> Iterator[Finding]:
    """Check the mode of the file with Ray's token."""
    check, path = "token file", token_path()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        yield Finding(check, INFO, f"there is no file {path}")
        return
    if mode & 0o077 and not is_private(path):
        yield Finding(
            check, WARN, f"other users may read {path} (mode {mode:o})", f"chmod 600 {path}"
        )
    else:
        yield Finding(check, OK, f"{path} is readable by this user only")


def session_folders(expected: Expected) -> Iterator[Finding]:
    """Check who may enter the folders of this user's Ray, which contain sockets and logs."""
    check = "Ray session folder"
    folders = {
        Path(match[1])
        for _, uid, command in _processes()
        if uid == os.geteuid() and DAEMONS[0] in command and (match := SESSION.search(command))
    }
    for folder in sorted(folders):
        try:
            mode = stat.S_IMODE(folder.stat().st_mode)
            private = is_private(folder)
        except OSError:  # it has ended
            continue
        if private or not mode & 0o077:
            yield Finding(check, OK, f"{folder} is accessible to this user only")
        else:
            may = "write to" if mode & 0o022 else "read"
            yield Finding(
                check, WARN, f"other users may {may} {folder} (mode {mode:o})",
                "start Ray with --temp-dir in a folder of mode 700 with a short path (`alchemist "
                "slurm` and sessions that start Ray do), or make its parent private",
            )  # fmt: skip
    if not folders:
        yield Finding(check, INFO, "this user runs no Ray here")


def other_users_ray(expected: Expected) -> Iterator[Finding]:
    """Report Ray clusters of other users on this machine."""
    check = "other users' Ray"
    uids = {
        uid for folder, uid, _ in _processes() if uid != os.geteuid() and _name(folder) in DAEMONS
    }
    if not uids:
        yield Finding(check, OK, "none on this machine")
        return
    names = ", ".join(sorted(_user(uid) for uid in uids))
    yield Finding(
        check, WARN, f"also running here: Ray of {names}",
        "set RAY_ADDRESS so that programs join your own cluster, and RAY_TMPDIR so that the "
        "session folders differ",
    )  # fmt: skip


def shared_node(expected: Expected) -> Iterator[Finding]:
    """Check whether other people run processes on a node of a batch job."""
    if job_id(os.environ) is None:
        return
    others = other_users()
    if others:
        yield Finding(
            "shared node", WARN, f"other users run processes here: {', '.join(others[:SHOWN])}",
            "request whole nodes (--exclusive): MPI's ports of gangs on several nodes require no "
            "token",
        )  # fmt: skip
    else:
        yield Finding("shared node", OK, "no other user runs a process here")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def ptrace_scope(
    expected: Expected, path: Path = Path("/proc/sys/kernel/yama/ptrace_scope")
) -> Iterator[Finding]:
    """Check whether ranks may read each other's memory, MPI's fastest way within a node."""
    check = "ptrace scope"
    try:
        scope = int(path.read_text())
    except (OSError, ValueError):
        yield Finding(check, OK, "unrestricted")
        return
    if scope >= 2:
        yield Finding(
            check, WARN, f"{scope}: ranks cannot read each other's memory",
            "MPI copies large messages twice within a node; `sysctl kernel.yama.ptrace_scope=1`, "
            "or accept it",
        )  # fmt: skip
    else:
        yield Finding(check, OK, f"{scope}")


CHECKS = {
    "open ports": open_ports,
    "token file": token_files,
    "Ray session folder": session_folders,
    "other users' Ray": other_users_ray,
    "shared node": shared_node,
    "ptrace scope": ptrace_scope,
}
