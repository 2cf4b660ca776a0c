"""The keeper: starts Ray on all nodes of a job, watches it, and stops it; a gateway in a job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from alchemist_ray.deploy.slurm import allocation
from alchemist_ray.deploy.slurm.allocation import Allocation, Node, is_this_node
from alchemist_ray.deploy.slurm.sites import Site
from alchemist_ray.deploy.slurm.supervisors import Supervisors
from alchemist_ray.errors import JobError
from alchemist_ray.runtime.cluster.batch_job import JobCluster, JobFolder
from mpi_workers.wire.frames import Body

SLOW_S = 30.0  # a longer start is explained


@dataclass(slots=True)
class RayInJob:
    """Ray on the nodes of a job (a context manager).

    Attributes
    ----------
    allocation : Allocation
    site : Site
    folder : JobFolder
        For token and address.
    check : callable()
        Called while waiting; raises to end the wait (a signal has arrived).
    container : list of str
        Command prefix that runs a program in the job's image; empty without an image.
    settings : dict
        Environment variables with launcher settings, for programs that join later.
    cpus_per_node : int, optional
        CPUs of each node for Ray. None: the job's.
    start_timeout_s : float
        Time limit of the start without progress.
    warnings : list of str
    address : JobCluster or None
        None until Ray is up.

    Raises
    ------
    JobError
        If Ray does not start.
    """

    allocation: Allocation
    site: Site
    folder: JobFolder
    check: Callable[[], None]
    container: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    cpus_per_node: int | None = None
    start_timeout_s: float = 120.0
    warnings: list[str] = field(default_factory=list, init=False)
    address: JobCluster | None = field(default=None, init=False)
    _supervisors: Supervisors = field(init=False)
    _hello: dict[str, Body] = field(default_factory=dict, init=False)
    _up: set[str] = field(default_factory=set, init=False)
    _lost: set[str] = field(default_factory=set, init=False)
    _retried: dict[str, str] = field(default_factory=dict, init=False)  # output of failed starts
    _ready: bool = field(default=False, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    _progress: tuple[float, str] = field(init=False)  # time of the last, and its subject
    _slowest: tuple[float, str] = field(default=(0.0, ""), init=False)

    def __post_init__(self) -> None:
        self._supervisors = Supervisors(self.allocation, self.site, self.folder, self.container)
        self._progress = (self._began, "the job's step")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- start ---

    def _start(self) -> None:
        self.folder.make()
        nodes = self.allocation.nodes
        self._supervisors.start()
        self._await(lambda: len(self._hello) == len(nodes), self._missing)
        self.warnings += allocation.check(self.allocation, self._hello, self.site.nodes.shared)
        first = self._block()
        head = next((node for node in nodes if is_this_node(node.name)), nodes[0])
        address = f"{self._hello[head.name]['ip']}:{first}"
        self._order_start(head, first, address, head=True)
        self._await(lambda: head.name in self._up, lambda: f"Ray's head on {head.name}")
        for node in nodes:
            if node is not head:
                self._order_start(node, first, address, head=False)
        wait = {"address": address, "nodes": len(nodes), "limit_s": self.start_timeout_s}
        self._supervisors.tell(head.name, "await", **wait)
        self._await(lambda: self._ready, self._without_ray)
        self.address = JobCluster(
            address=address,
            job=self.allocation.job,
            head=head.name,
            nodes=[node.name for node in nodes],
            cpus=sum(self._cpus(node) for node in nodes),
            keeper_host=os.uname().nodename,
            keeper_pid=os.getpid(),
            container=self.container,
            settings=self.settings,
        )
        for node in nodes:
            self._supervisors.tell(node.name, "settled")
        self.folder.write_cluster(self.address)
        took = time.monotonic() - self._began
        if took > SLOW_S:
            waited, subject = self._slowest
            self.warnings.append(
                f"Ray took {took:.0f} s to start, including {waited:.0f} s of waiting for {subject}"
            )

    def _cpus(self, node: Node) -> int:
        return self.cpus_per_node or node.cpus

    def _order_start(self, node: Node, first: int, address: str, *, head: bool) -> None:
        self._supervisors.tell(
            node.name,
            "start",
            head=head,
            address=address,
            first=first,
            cpus=self._cpus(node),
            memory=node.memory_nbytes or 0,
            object_store=self.site.nodes.object_store,
            metrics=self.site.nodes.metrics,
        )

    def _block(self) -> int:
        """Return the first port of a block that is free on every node."""
        job = self.allocation.job
        free = set.intersection(*(set(hello["free"]) for hello in self._hello.values()))
        if not free:
            raise JobError(
                f"no {allocation.BLOCK} consecutive ports are free on all nodes: checked "
                f"{allocation.TRIES} blocks, the first at {allocation.block(job)}"
            )
        return allocation.block(job, min(free))

    def _await(self, done: Callable[[], bool], subject: Callable[[], str]) -> None:
        """Wait for the nodes as long as they make progress. Raises `JobError`."""
        limit_s = self.start_timeout_s
        self._progressed(subject())
        while not done():
            self.check()
            if time.monotonic() > self._progress[0] + limit_s:
                raise JobError(
                    f"{self._output()}\n{subject()} did not start: no progress in {limit_s:.0f} s "
                    "(--start-timeout)"
                )
            if (code := self._supervisors.exit_code()) is not None:
                raise JobError(
                    f"{self._output()}\nthe step that starts Ray on the nodes ended with exit code "
                    f"{code}: see its output above, and the job's log"
                )
            for name, body in self._supervisors.news():
                if self._is_progress(name, body):
                    self._progressed(subject())

    def _progressed(self, subject: str) -> None:
        """Note progress; `subject` is the part of the start that is being waited for now."""
        now = time.monotonic()
        last, waited_for = self._progress
        self._slowest = max(self._slowest, (now - last, waited_for))
        self._progress = (now, subject)

    def _is_progress(self, name: str, body: Body) -> bool:
        """Note an event during the start; returns whether it is progress."""
        match body["op"]:
            case "hello":
                self._hello[name] = body
            case "up":
                self._up.add(name)
            case "counted":
                pass
            case "ready" if body["ok"]:
                self._ready = True
            case "again":
                self._retried[name] = str(body["said"])
                return False
            case "ready":
                raise JobError(f"Ray's nodes did not find each other: {body['said']}")
            case "ray_ended":
                raise JobError(
                    f"Ray did not start on {name}: exit code {body['code']}\n{body['said']}"
                )
            case "unknown":  # it was started by the job's step
                raise JobError(f"a supervisor was started on another node: {body['why']}")
            case "lost":
                raise JobError(f"{self._output()}\nnode {name} was lost while Ray was starting")
        return True

    def _missing(self) -> str:
        missing = [n.name for n in self.allocation.nodes if n.name not in self._hello]
        return f"the supervisors on {', '.join(missing)}"

    def _without_ray(self) -> str:
        missing = [n.name for n in self.allocation.nodes if n.name not in self._up]
        return f"Ray on {', '.join(missing)}" if missing else "the cluster's count of its nodes"

    def _output(self) -> str:
        """Return the output of the supervisors and of repeated starts of Ray."""
        parts = [f"output of the supervisors:\n{self._supervisors.output() or '(none)'}"]
        parts += [
            f"Ray on {name}, before it was started again:\n{text}"
            for name, text in self._retried.items()
        ]
        return "\n".join(parts)

    # --- while it runs ---

    def lost_nodes(self) -> list[str]:
        """Return the nodes that were lost since the last call.

        Raises
        ------
        JobError
            If the head is one of them: Ray is lost.
        """
        lost = []
        for name, body in self._supervisors.news():
            if body["op"] in ("lost", "ray_ended") and name not in self._lost:
                self._lost.add(name)
                lost.append(name)
        if self.address is not None and self.address.head in lost:
            raise JobError(f"node {self.address.head}, with Ray's head, is lost")
        return lost

    # --- end ---

    def stop(self) -> None:
        """Stop Ray on all nodes and wait until they are clean."""
        with contextlib.suppress(OSError):
            self.folder.token.unlink()  # first: the time may not suffice for the rest
        self._supervisors.stop()
        self.folder.clear()
