"""RayTransport: a gang's own sockets, and its GroupManager through Ray."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import ray

from alchemist_ray.attached.address import GangAddress
from alchemist_ray.attached.connection import GangConnection, Transport
from alchemist_ray.attached.rank_channel import RankChannel, Serve, open_rank_channel
from alchemist_ray.cluster.actors import GangHandle, ask_manager
from alchemist_ray.cluster.ray_connection import while_connected
from mpi_workers.wire.frames import Body

ATTACH_TIMEOUT_S = 30.0
RESULTS_INTERVAL_S = 1.0  # between looks for ObjectRefs that are gone


class RayTransport(Transport):
    """For a process in the gang's Ray cluster."""

    manager: GangHandle

    def __init__(self, manager: GangHandle) -> None:
        self.manager = manager

    def address_now(self) -> GangAddress:
        found: GangAddress = ask_manager(self.manager.gang_address(), ATTACH_TIMEOUT_S)
        return found

    def keep_source(self, epoch: int, matrix: int, data: Any) -> None:
        ask_manager(self.manager.keep_source(epoch, matrix, data))

    def open_rank_channel(
        self, connection: GangConnection, serve: Serve, timeout_s: float
    ) -> RankChannel | None:
        return open_rank_channel(serve, connection.cancel, connection.address, timeout_s)

    def start_call(self, connection: GangConnection, body: Body) -> Any:
        """An ObjectRef of the results."""
        return connection.part(RemoteResults).call(body)


class RemoteResults:
    """The calls of this process that returned an ObjectRef. Thread-safe.

    The dispatcher leases the results of such a call to a token, which begins with the id of this
    process: the lease ends with the ObjectRef, or with the process. Ray has no callback for the
    end of an ObjectRef and its objects take no weak references, so a thread compares the tokens
    with Ray's table of references, while there are any. This process owns the objects: the table
    has them as long as any process of the cluster refers to them.
    """

    def __init__(self, connection: GangConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._tokens: dict[bytes, str] = {}  # by object id, as Ray's table has it
        self._watched = False

    def call(self, body: Body) -> Any:
        """Start a routine call; the ObjectRef of its results."""
        connection = self._connection
        token = f"{connection.process}/{uuid.uuid4().hex}"
        ref: Any = connection.transport.manager.call(connection.address.epoch, body, token)
        with self._lock:
            self._tokens[ref.hex().encode()] = token
            if not self._watched:
                self._watched = True
                threading.Thread(
                    target=self._watch, name="alchemist-remote-results", daemon=True
                ).start()
        return ref

    def _watch(self) -> None:
        while True:
            time.sleep(RESULTS_INTERVAL_S)
            with while_connected() as connected:
                if self._connection.closed or not connected:
                    return
                worker: Any = ray._private.worker.global_worker
                alive = worker.core_worker.get_all_reference_counts()
            with self._lock:
                over = [ref for ref in self._tokens if ref not in alive]
                tokens = [self._tokens.pop(ref) for ref in over]
                if not self._tokens:
                    self._watched = False
                done = not self._watched
            if tokens:  # in the same order as the calls, which may still wait for their turn
                self._connection.transport.manager.end_results(tokens)
            if done:
                return
