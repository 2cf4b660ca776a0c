"""A node's supervisor: starts Ray on its node of a job, and removes every trace of it.

One process per node, started by a single step of the job. It receives its commands from the keeper
(`keeper`). When that connection breaks, or the batch system sends SIGTERM, it stops Ray, kills
all descendants, and removes the node's folder.

    python -m alchemist_ray.deploy.slurm.node '{"keeper": "tcp:10.0.0.1:4000", ...}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from alchemist_ray.deploy.slurm import ports, shared_nodes
from alchemist_ray.deploy.slurm.folder import NodeFolder
from alchemist_ray.deploy.slurm.ray_node import RayNode
from alchemist_ray.deploy.slurm.relay import VARIABLE as RELAY
from alchemist_ray.deploy.slurm.relay import Relay
from alchemist_ray.runtime.network import local_address
from mpi_workers.node import process_control
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, Kind, WireError

POLL_INTERVAL_S = 0.1
KEEPER_TIMEOUT_S = 30.0  # for the keeper to answer


@dataclass(frozen=True, slots=True)
class NodeTask:
    """Parameters of a supervisor.

    Attributes
    ----------
    keeper : str
        Address of the keeper.
    token : str
        Path of the file with the job's token.
    job : str
    tmp : str
        Parent of the node's folder.
    interface : list of str
        As in the site file.
    container : list of str
        Command prefix that runs a program in the job's image; empty without an image.
    """

    keeper: str
    token: str
    job: str
    tmp: str
    interface: list[str]
    container: list[str]


class Supervisor:
    """A supervisor, and the owner of its node's folder.

    Raises
    ------
    JobError
        If the folder cannot be created, or the network interface does not exist.
    """

    def __init__(self, task: NodeTask) -> None:
        self._task = task
        self._token = Path(task.token).read_text()
        self._folder = NodeFolder(task.tmp, task.job)
        self._relay: Relay | None = None
        self._ray: RayNode | None = None
        self._connection: Connection | None = None
        self._stopped = False

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: end at the next poll."""
        self._stopped = True

    def run(self) -> int:
        """Obey the keeper until the end. Returns the exit code."""
        task = self._task
        try:
            ip = local_address(task.interface, task.keeper)
            variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": task.token}
            if task.container:  # the image has no srun
                self._relay = Relay(self._folder.path / "relay")
                variables[RELAY] = str(self._relay.path)
            self._ray = RayNode(self._folder, ip, variables, task.container)
            hello: Body = {
                "role": "supervisor",
                "name": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
                "hostname": os.uname().nodename,
                "ip": ip,
                "free": ports.free_attempts(task.job, ip),
                "cores": os.cpu_count() or 1,
                "others": shared_nodes.other_users(),
            }
            self._connection, _ = connect(
                task.keeper, self._token, hello, timeout_s=KEEPER_TIMEOUT_S
            )
            self._obey(self._connection, self._ray)
        finally:
            self._end()
        return 0

    def _obey(self, connection: Connection, ray: RayNode) -> None:
        while not self._stopped:
            if connection.readable(POLL_INTERVAL_S):
                try:
                    order = dict(connection.recv().body)
                except WireError:
                    return  # the keeper has ended
                match order.pop("op"):
                    case "start":
                        ray.start(**order)
                    case "await":
                        ray.await_nodes(**order)
                    case "settled":
                        ray.settled = True
                    case "stop":
                        return
            for op, told in ray.news():
                self._tell(op, **told)

    def _tell(self, op: str, **fields: Any) -> None:
        if self._connection is not None:
            with suppress(WireError):
                self._connection.send(Kind.EVENT, {"op": op, **fields})

    def _end(self) -> None:
        if self._ray is not None:
            self._ray.end()
        if self._relay is not None:
            self._relay.close()
        process_control.end_descendants()
        self._folder.remove()
        self._tell("gone")
        if self._connection is not None:
            self._connection.close()


def main(argv: list[str]) -> int:
    """Supervise this node until the end. Returns the exit code."""
    process_control.adopt_orphans()
    supervisor = Supervisor(NodeTask(**json.loads(argv[0])))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, supervisor.stop)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
