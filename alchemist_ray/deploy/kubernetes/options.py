"""What can be asked of a cluster on Kubernetes, checked before anything is rendered."""

from __future__ import annotations

import re
from dataclasses import dataclass

from alchemist_ray.deploy.kubernetes.versions import IMAGE

GANG_SCHEDULERS = ("scheduler-plugins", "volcano", "yunikorn", "kueue")
QUEUES = {"volcano": "default", "yunikorn": "root.default", "kueue": "alchemist"}
OBJECT_STORE_SHARE = 0.3  # of a pod's memory, as Ray takes it; the rest is for ranks and tasks
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
CLUSTER_NAME_LIMIT = 53  # KubeRay makes longer names of it, which must be DNS labels
JOB_NAME_LIMIT = 47
SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SUFFIXES |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """A Ray cluster with gangs, on Kubernetes.

    Parameters
    ----------
    name, namespace : str
        Of the RayCluster (or RayJob); DNS labels.
    image : str
        With alchemist-on-ray, tini, bash and a user of id 1000. A tag or digest, never `latest`.
    pull_policy : {"IfNotPresent", "Always", "Never"}
    workers : int
        Worker pods. Each takes as many ranks as it has CPUs.
    cpus : int
        CPUs of each worker pod: whole ones, so that a kubelet with the static CPU manager
        gives ranks cores of their own.
    memory : str
        Memory of each worker pod, a Kubernetes quantity. It is the limit of everything in
        the pod: ranks, object store and /dev/shm.
    head_cpus, head_memory : str
        Of the head pod, which runs no ranks.
    autoscale : bool
        From 0 to `workers` pods, as gangs ask for them; else always `workers`.
    idle_timeout_s : int
        Seconds after which the autoscaler takes an idle pod away.
    gang : str, optional
        One of `GANG_SCHEDULERS`: all pods are scheduled, or none.
    queue : str, optional
        Of the gang scheduler. Default: see `QUEUES`.
    host_network : bool
        Worker pods use their node's network, one pod to a node.
    rdma_resource : str, optional
        What the nodes' RDMA device plugin calls its devices; with `host_network`.
    network_policy : bool
        Let nobody reach the pods but each other, the operator and Prometheus.
    monitoring : bool
        ServiceMonitor, PodMonitor and a Grafana dashboard, for the Prometheus operator.
    job : str, optional
        A shell command: render a RayJob that makes the cluster, runs it and ends.

    Raises
    ------
    ValueError
        For what cannot be; it names the option.
    """

    name: str = "alchemist"
    namespace: str = "alchemist"
    image: str = IMAGE
    pull_policy: str = "IfNotPresent"
    workers: int = 2
    cpus: int = 4
    memory: str = "16Gi"
    head_cpus: str = "2"
    head_memory: str = "8Gi"
    autoscale: bool = False
    idle_timeout_s: int = 60
    gang: str | None = None
    queue: str | None = None
    host_network: bool = False
    rdma_resource: str | None = None
    network_policy: bool = False
    monitoring: bool = False
    job: str | None = None

    def __post_init__(self) -> None:
        limit = CLUSTER_NAME_LIMIT if self.job is None else JOB_NAME_LIMIT
        for what, value, most in (("name", self.name, limit), ("namespace", self.namespace, 63)):
            if not NAME.fullmatch(value) or len(value) > most:
                raise ValueError(
                    f"{what}={value!r}: it must be at most {most} of a-z, 0-9 and -, begin with a "
                    "letter and not end with -"
                )
        tag = self.image.rpartition("/")[2].partition(":")[2]
        if not tag or tag == "latest":
            raise ValueError(
                f"image={self.image!r}: name a version (repository/name:tag or @sha256:...): all "
                "pods of a cluster must run the same, also those that come later"
            )
        for option, number in (("workers", self.workers), ("cpus", self.cpus)):
            if number < 1:
                raise ValueError(f"{option}={number}: it must be at least 1")
        if self.idle_timeout_s < 1:
            raise ValueError(f"idle_timeout_s={self.idle_timeout_s}: it must be at least 1")
        for option, text in (("memory", self.memory), ("head_memory", self.head_memory)):
            if quantity_bytes(text, option) < 1 << 30:
                raise ValueError(f"{option}={text!r}: Ray and its object store need 1Gi or more")
        self._check_together()

    def _check_together(self) -> None:
        if self.gang is not None and self.gang not in GANG_SCHEDULERS:
            raise ValueError(f"gang={self.gang!r}: it is one of {', '.join(GANG_SCHEDULERS)}")
        if self.gang is not None and self.autoscale:
            raise ValueError(
                "gang and autoscale exclude each other: a gang scheduler admits all pods of a "
                "cluster at once, the autoscaler asks for them one by one. Choose one"
            )
        if self.gang == "scheduler-plugins" and self.job is not None:
            raise ValueError(
                "gang='scheduler-plugins' with a job: KubeRay 1.6 refuses RayJobs under it. Take "
                "another gang scheduler, or a RayCluster and `ray job submit`"
            )
        if self.queue is not None and self.gang not in QUEUES:
            raise ValueError(f"queue={self.queue!r}: only {', '.join(QUEUES)} have queues")
        if self.rdma_resource is not None and not self.host_network:
            raise ValueError("rdma_resource needs host_network: the devices are the node's")
        if self.host_network and self.network_policy:
            raise ValueError(
                "network_policy does not hold for pods on their node's network: leave it out and "
                "guard the nodes (a gang's ports ask for its token all the same)"
            )

    @property
    def object_store_bytes(self) -> tuple[int, int]:
        """Of the head's object store and of a worker's."""
        head = quantity_bytes(self.head_memory, "head_memory")
        worker = quantity_bytes(self.memory, "memory")
        return int(head * OBJECT_STORE_SHARE), int(worker * OBJECT_STORE_SHARE)

    @property
    def queue_name(self) -> str:
        """The gang scheduler's queue."""
        return self.queue or QUEUES.get(self.gang or "", "")


def quantity_bytes(text: str, option: str) -> int:
    """Bytes of a Kubernetes quantity (``8Gi``). Raises `ValueError`, which names the option."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?", text)
    if not found:
        raise ValueError(f"{option}={text!r}: it is a quantity of Kubernetes, like 8Gi or 500M")
    return int(float(found[1]) * SUFFIXES[found[2] or ""])
