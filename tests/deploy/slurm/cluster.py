"""A real Slurm on one machine: a login host and nodes, each in namespaces of its own.

Built on `tests.faults.hosts`: the login host runs slurmctld, every node a slurmd; munge's
socket and one folder (the "shared file system") are on all of them. Up in seconds, gone with
the processes that hold the namespaces.

    with Slurm(nodes=3) as slurm:
        slurm.login("sbatch", "--wait", script)
        slurm.nodes[2].kill()
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.faults.hosts import ROOT, Host, Hosts
from tests.faults.hosts import why_not as why_no_hosts
from tests.support import commands, traces

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PACKAGES = "RUNLEVEL=1 apt-get install -y --no-install-recommends slurm-wlm munge slurm-wlm-torque"
CPUS = 4  # that each node claims; the machine has fewer
GPUS = 2  # the same; their device files are empty
UP_S = 40.0
CONF = """\
ClusterName=lab
SlurmctldHost={login}({login_ip})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/sock
StateSaveLocation={root}/state
SlurmdSpoolDir=/var/tmp/slurmd-%n
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile={root}/log/slurmctld
SlurmdLogFile={root}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SlurmdParameters=config_overrides
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
KillWait=16
SlurmdTimeout=300
MessageTimeout=20
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=short Nodes=ALL MaxTime=5 State=UP
"""
NODE = (
    "NodeName={name} NodeAddr={ip} CPUs={cpus} CoresPerSocket={cpus} RealMemory=2000 "
    "Gres=gpu:{gpus}\n"
)


def why_not() -> str | None:
    """Why there can be no Slurm here, or None."""
    missing = [name for name in DAEMONS if not (shutil.which(name) or _sbin(name))]
    if missing:
        return f"no {', '.join(missing)} on this machine; as root: {PACKAGES}"
    return why_no_hosts()


def _sbin(name: str) -> str | None:
    return shutil.which(name, path="/usr/sbin:/sbin")


# States of a job whose script is not over. SIGNALING: a signal is on its way to the node, which on
# a loaded machine takes seconds.
RUNS = ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING")
LIVES = (*RUNS, "COMPLETING")  # nor its nodes known to be clean


class Slurm(commands.System):
    """A login host and `nodes` nodes (a context manager).

    Raises `RuntimeError` if it does not come up.
    """

    def __init__(self, nodes: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._hosts = Hosts(nodes + 1, shared=[self.root])
        self._count = nodes
        self._munged: subprocess.Popen[bytes] | None = None
        self.nodes: list[Host] = []

    @property
    def shared(self) -> Path:
        """A folder that all hosts see: the cluster's home."""
        return self.root / "home"

    def start(self) -> None:
        """Bring Slurm up on all hosts, and wait until its nodes are idle."""
        for folder in ("munge", "state", "log", "home"):
            (self.root / folder).mkdir(mode=0o755)
        self.root.chmod(0o755)
        self._start_munge()
        self._hosts.start()
        everybody = [self._hosts[i] for i in range(self._count + 1)]
        self._login, self.nodes = everybody[0], everybody[1:]
        names = "".join(f"{host.ip} {host.name}\n" for host in everybody)
        (self.root / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        conf = CONF.format(login=self._login.name, login_ip=self._login.ip, root=self.root)
        listed = [NODE.format(name=n.name, ip=n.ip, cpus=CPUS, gpus=GPUS) for n in self.nodes]
        head, partition = conf.split("PartitionName", 1)
        (self.root / "slurm.conf").write_text(f"{head}{''.join(listed)}PartitionName{partition}")
        for number in range(GPUS):
            (self.root / f"gpu{number}").touch()
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[0-{GPUS - 1}]\n")
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        with ThreadPoolExecutor() as threads:
            list(threads.map(self._furnish, everybody))
        self._daemon(self._login, "slurmctld", "-D")
        for node in self.nodes:
            self._daemon(node, "slurmd", "-D", "-N", node.name)
        if traces.wait_until(lambda: self._idle() == self._count, UP_S, 0.1) is None:
            said = [p.read_text()[-1500:] for p in sorted((self.root / "log").iterdir())]
            raise RuntimeError("Slurm did not come up:\n" + "\n".join(said))

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key": key, "socket": folder / "sock", "pid": folder / "pid"}
        self._munged = subprocess.Popen(
            [
                _sbin("munged") or "munged", "--foreground", "--force", "--num-threads=2",
                f"--key-file={files['key']}", f"--socket={files['socket']}",
                f"--pid-file={files['pid']}", f"--log-file={folder / 'log'}",
                f"--seed-file={folder / 'seed'}",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=commands.die_with_parent,
        )  # fmt: skip

    def _furnish(self, host: Host) -> None:
        host.run("mount", "--bind", self.root / "hosts", "/etc/hosts")
        host.run("mount", "-t", "tmpfs", "tmpfs", "/var/tmp")

    def _daemon(self, host: Host, *command: str) -> None:
        with open(self.root / "log" / f"{command[0]}.{host.name}.out", "wb") as log:
            subprocess.Popen(
                host.enter(_sbin(command[0]) or command[0], *command[1:]),
                env={**os.environ, "SLURM_CONF": str(self.root / "slurm.conf")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _idle(self) -> int:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            return int(self.login("sinfo", "-h", "-t", "idle", "-o", "%D").strip() or 0)
        return 0

    # --- what a user does ---

    def environment(self) -> dict[str, str]:
        """The environment of a user on the login host, without the suite's own Ray."""
        base = self._login.environment()
        kept = {k: v for k, v in base.items() if not k.startswith(("RAY_", "SLURM_"))}
        return kept | {
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "HOME": str(self.shared),
            "USER": "root",
            "ALCHEMIST_START_TIMEOUT": "250",  # on a machine that others use too
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",  # as in tests/conftest.py
        }

    def command(self, *words: object, host: Host | None = None) -> list[str]:
        """The command line that runs a command on the login host, or on a node."""
        return [
            w.replace(f"--wd={ROOT}", f"--wd={self.shared}")
            for w in (host or self._login).enter(*words)
        ]

    def login(self, *words: object, limit_s: float = 60.0, check: bool = True) -> str:
        """Run a command on the login host; what it says. Raises `RuntimeError` if it fails."""
        return commands.output(
            *self.command(*words), env=self.environment(), limit_s=limit_s, merged=True,
            code=0 if check else None,
        )  # fmt: skip

    def salloc(
        self, *words: Any, limit_s: float = 400.0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host, in an allocation of two nodes."""
        command = self.command("salloc", "-N2", "--ntasks-per-node=1", *words)
        return commands.run(*command, env=self.environment(), limit_s=limit_s, **env)

    def state(self, job: str) -> dict[str, str]:
        """The output of scontrol for a job."""
        told = self.login("scontrol", "show", "job", job)
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    def wait(self, job: str, limit_s: float, lives: Collection[str] = LIVES) -> dict[str, str]:
        """Wait until a job is over; what scontrol says of it then."""
        deadline = time.monotonic() + limit_s
        while (about := self.state(job))["JobState"] in lives:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is still {about['JobState']} after {limit_s} s")
            time.sleep(0.2)
        return about

    def close(self) -> None:
        """End all of it."""
        self._hosts.close()
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()
        shutil.rmtree(self.root, ignore_errors=True)
