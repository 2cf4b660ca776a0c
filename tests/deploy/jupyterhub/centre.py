"""A computing centre on one machine: a Slurm of two nodes, two users, and a JupyterHub.

The hub runs on the login host with `cray/jupyterhub_config.py`. Notebook servers are jobs. The
users are in passwd and group of all hosts; the interpreter's folder is opened to them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.deploy.slurm.cluster import ROOT, Slurm
from tests.deploy.slurm.cluster import why_not as why_no_slurm
from tests.faults.hosts import Host
from tests.support import commands, traces

USERS = {"anna": 2001, "ben": 2002}
PASSWORD = "a password of the tests"
PORT = 8000
MODULES = ("batchspawner", "configurable_http_proxy", "jupyter_server", "jupyterhub")
CONFIG = """\
import batchspawner
load_subconfig({recipe!r})
c.JupyterHub.bind_url = "http://{ip}:{port}"
c.JupyterHub.hub_ip = {ip!r}
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/cookie"
c.JupyterHub.cleanup_servers = False
c.JupyterHub.cleanup_proxy = True
c.JupyterHub.pid_file = "{folder}/pid"
c.ConfigurableHTTPProxy.pid_file = "{folder}/proxy.pid"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = {password!r}
c.Authenticator.allowed_users = {users!r}
c.SlurmSpawner.exec_prefix = "runuser -u {{username}} --"  # as sudo of the recipe
c.SlurmSpawner.req_memory = "900M"
c.SlurmSpawner.poll_interval = 5
c.Spawner.env_keep = {kept!r}
c.Spawner.environment = {{"JUPYTERHUB_SINGLEUSER_APP": "jupyter_server.serverapp.ServerApp"}}
"""
KEPT = ["PATH", "PYTHONPATH", "LANG", "SLURM_CONF", "ALCHEMIST_START_TIMEOUT",
        "RAY_USAGE_STATS_ENABLED", "RAY_prestart_worker_first_driver"]  # fmt: skip


def why_not() -> str | None:
    """Why there can be no such centre here, or None."""
    if missing := [name for name in MODULES if importlib.util.find_spec(name) is None]:
        return f"no {', '.join(missing)}: pip install 'alchemist-on-ray[hub]'"
    if shutil.which("runuser") is None:
        return "no runuser on this machine (util-linux)"
    return why_no_slurm()


class Centre(Slurm):
    """See the module."""

    def start(self) -> None:
        """Bring up Slurm and the hub."""
        for kind in ("passwd", "group"):
            text = Path("/etc", kind).read_text()
            rows = {
                "passwd": "{name}:x:{uid}:{uid}::{home}:/bin/bash\n",
                "group": "{name}:x:{uid}:\n",
            }
            text += "".join(
                rows[kind].format(name=name, uid=uid, home=self.home(name))
                for name, uid in USERS.items()
            )
            (self.root / kind).write_text(text)
        super().start()
        for name, uid in USERS.items():
            self.home(name).mkdir(mode=0o700)
            os.chown(self.home(name), uid, uid)
        folder = self.root / "hub"
        folder.mkdir(mode=0o700)
        config = CONFIG.format(
            recipe=str(ROOT / "cray/jupyterhub_config.py"), ip=self._login.ip, port=PORT,
            folder=folder, password=PASSWORD, users=set(USERS), kept=KEPT,
        )  # fmt: skip
        (folder / "config.py").write_text(config)
        self.start_hub()

    def _furnish(self, host: Host) -> None:
        super()._furnish(host)
        for kind in ("passwd", "group"):
            host.run("mount", "--bind", self.root / kind, f"/etc/{kind}")
        base = Path(sys.base_prefix)
        if closed := [each for each in base.parents if not each.stat().st_mode & 0o005]:
            # Only the interpreter is left in the folder that other users cannot enter.
            top = closed[-1]
            script = (
                f"mkdir -p /var/tmp/base && mount --bind {base} /var/tmp/base && "
                f"mount -t tmpfs -o mode=755 tmpfs {top} && mkdir -p {base} && "
                f"mount --bind /var/tmp/base {base}"
            )
            host.run("sh", "-c", script)

    def nodes_of(self, job: str) -> list[Host]:
        """The nodes of a job."""
        names = self.login("squeue", "-h", "-j", job, "-o", "%N").strip().split(",")
        return [node for node in self.nodes if node.name in names]

    def home(self, user: str) -> Path:
        return self.shared / user

    def start_hub(self) -> None:
        """Start the hub, and its proxy, and wait until they answer."""
        folder = self.root / "hub"
        # From a folder that the users' commands can enter, too.
        words = [
            "env",
            "-C",
            "/",
            sys.executable,
            "-m",
            "jupyterhub",
            "-f",
            str(folder / "config.py"),
        ]
        with open(folder / "log", "ab") as log:
            hub = subprocess.Popen(
                self.command(*words), env=self.environment() | {"HOME": str(folder)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

        def over() -> bool:
            return hub.poll() is not None or self.browser("answers")

        if traces.wait_until(over, 120, 0.5) is None or hub.poll() is not None:
            raise RuntimeError(f"the hub did not come up:\n{(folder / 'log').read_text()[-6000:]}")

    def kill_hub(self) -> None:
        """Kill the hub; its proxy stays."""
        for pid in self._login.pids("-m jupyterhub"):
            self._login.signal(pid)

    def browser(self, function: str, *arguments: Any, limit_s: float = 300.0) -> Any:
        """Call a function of `browser.py`, whose process stays on the login host."""
        return self._login.call(
            f"tests.deploy.jupyterhub.browser:{function}",
            f"http://{self._login.ip}:{PORT}", *arguments, limit_s=limit_s,
        )  # fmt: skip

    def as_user(self, user: str, *words: object, limit_s: float = 60.0, check: bool = True) -> str:
        """Run a command of a user on the login host."""
        env = self.environment() | {"HOME": str(self.home(user)), "USER": user, "LOGNAME": user}
        command = self.command("runuser", "-u", user, "--", "env", "-C", self.home(user), *words)
        return commands.output(
            *command, env=env, limit_s=limit_s, merged=True, code=0 if check else None
        )
