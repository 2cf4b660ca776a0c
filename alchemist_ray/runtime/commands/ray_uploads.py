"""Uploads through Ray: between this process, the GroupManager and the nodes' agents."""

from __future__ import annotations

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ActorUnschedulableError, RayActorError

from alchemist_ray.errors import GroupFailedError, TransferError
from alchemist_ray.functions.node_files import carried
from alchemist_ray.functions.uploads import Uploads
from alchemist_ray.runtime.cluster.ray_calls import ask, ask_manager
from alchemist_ray.transfer.object_location import agent_of

POLL_INTERVAL_S = 1.0


class RayUploads(Uploads):
    """This process's files on a gang of its Ray cluster."""

    def put(self, name: str, content: bytes) -> None:
        epoch, process = self.connection.address.epoch, self.connection.process
        ask_manager(self.connection.manager.stage.remote(epoch, name, carried(content), process))

    def collect(self, name: str) -> list[NDArray[np.uint8]]:
        incarnation = ""
        while incarnation != self.connection.address.incarnation:  # it may be moved meanwhile
            incarnation = self.connection.address.incarnation
            try:
                return self._collect(incarnation, name)
            except GroupFailedError as error:
                lost = error
                self.connection.ping(wait=True)
        raise lost

    def _collect(self, incarnation: str, name: str) -> list[NDArray[np.uint8]]:
        agent = agent_of(self.connection.address.node_ids[0])
        reading = agent.parts.options(max_task_retries=-1).remote(incarnation, name)
        while not ray.wait([reading], timeout=POLL_INTERVAL_S)[0]:
            self.connection.ping()  # raises if the gang is lost: Ray would wait for its node
            if self.connection.address.incarnation != incarnation:
                raise GroupFailedError(f"the result {name} was lost with the ranks that wrote it")
        try:
            found: list[NDArray[np.uint8]] = ask(reading)
        except (RayActorError, ActorUnschedulableError) as error:
            raise TransferError(
                f"the agent on rank 0's node has ended, so the result was not read: {error}"
            ) from error
        return found
