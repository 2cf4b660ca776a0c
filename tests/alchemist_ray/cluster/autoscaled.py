"""A Ray cluster on this machine with Ray's autoscaler, whose nodes are only processes.

Ray's own `AutoscalingCluster` calls ``ray stop``, which ends every Ray of the machine. This one
ends the processes that carry its mark in their environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from tests.support import commands, traces

MARK = "ALCHEMIST_TEST_CLUSTER"
START_LIMIT_S = 90.0
END_LIMIT_S = 20.0
UNUSED = (  # the autoscaler reads them
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files",
    "rsync_exclude", "rsync_filter",
)  # fmt: skip
STORE_NBYTES = 80 << 20


class AutoscaledCluster(commands.System):
    """Context manager: a head with some CPUs, and up to this many further nodes of one size.

    Attributes
    ----------
    address : str
    environment : dict of str to str
        For programs on it, which end with it.
    """

    def __init__(self, head_cpus: int, nodes: int, node_cpus: int, idle_minutes: float) -> None:
        self.address = f"127.0.0.1:{traces.free_port()}"
        self._mark = uuid.uuid4().hex
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self._head_cpus = head_cpus
        worker = {"CPU": node_cpus, "object_store_memory": STORE_NBYTES}
        self._config = {
            "cluster_name": "autoscaled",
            "max_workers": nodes,
            "idle_timeout_minutes": idle_minutes,
            "provider": {
                "type": "fake_multinode", "gcs_address": self.address, "use_node_id_as_ip": True,
                "disable_node_updaters": True, "disable_launch_config_check": True,
            },
            "available_node_types": {
                "ray.head.default": {
                    "resources": {"CPU": head_cpus}, "node_config": {}, "max_workers": 0,
                },
                "ray.worker": {
                    "resources": worker, "node_config": {}, "min_workers": 0, "max_workers": nodes,
                },
            },
            "head_node_type": "ray.head.default",
            "upscaling_speed": 1.0,
            "file_mounts_sync_continuously": False,
            **{key: {} for key in ("auth", "docker", "file_mounts")},
            **dict.fromkeys(UNUSED, ()),
        }  # fmt: skip
        self.environment = os.environ | {
            MARK: self._mark,
            "ALCHEMIST_GROWS_TO": f"{nodes + (head_cpus > 0)}x{node_cpus}",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "TMPDIR": str(self._folder),  # agents stay where any gang is
            "RAY_enable_autoscaler_v2": "0",
        }

    def start(self) -> None:
        """Start the head; the autoscaler in it starts nodes."""
        config = self._folder / "autoscaler.json"
        config.write_text(json.dumps(self._config))
        host, port = self.address.split(":")
        # Without pipes: the daemons of the head would hold them open.
        subprocess.run(
            [Path(sys.executable).with_name("ray"), "start", "--head", f"--port={port}",
             f"--node-ip-address={host}", f"--num-cpus={self._head_cpus}",
             f"--object-store-memory={STORE_NBYTES}", f"--temp-dir={self._folder}",
             "--include-dashboard=false", f"--autoscaling-config={config}"],
            env=self.environment | {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID},
            stdout=subprocess.DEVNULL, timeout=START_LIMIT_S, check=True,
        )  # fmt: skip

    def close(self) -> None:
        """End all processes of the cluster; nodes that are being started, too."""

        def ended() -> bool:
            for pid in (pids := self._processes()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        if traces.wait_until(ended, END_LIMIT_S, 0.1) is None:
            raise TimeoutError(f"processes {self._processes()} of the cluster do not end")
        shutil.rmtree(self._folder)

    def _processes(self) -> list[int]:
        """Processes with the mark in their environment; of zombies it cannot be read."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found
