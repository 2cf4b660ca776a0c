"""Options of a cluster on Kubernetes, checked before anything is rendered; versions it targets."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from alchemist_ray.version import __version__
from mpi_workers.matrix.sizes import parse_nbytes, readable

RAY_VERSION = "2.60.0"  # in the image; KubeRay selects probes and token authentication by it
KUBERAY_VERSION = "1.6.2"
KUBERNETES_VERSIONS = ("1.33", "1.34", "1.35")  # tests check the manifests against their schemas
IMAGE = f"alchemist-on-ray:{__version__}"


GANG_SCHEDULERS = ("scheduler-plugins", "volcano", "yunikorn", "kueue")
QUEUES = {"volcano": "default", "yunikorn": "root.default", "kueue": "alchemist"}
# Of a pod's memory, 3 tenths, Ray's own default; ranks and tasks get the rest.
OBJECT_STORE_TENTHS = 3
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")  # of a taint
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
CLUSTER_NAME_LIMIT = 53  # KubeRay derives longer names from it, which must be DNS labels
JOB_NAME_LIMIT = 47
NAMESPACE_LIMIT = 63
GIB = 1 << 30
# The API server of most clusters has an address in one of these (RFC 1918, RFC 6598).
PRIVATE_NETWORKS = ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16")

HELP = {
    "name": "name of the RayCluster or RayJob",
    "namespace": "its namespace",
    "image": "image with alchemist-on-ray; a fixed tag or digest",
    "pull_policy": "when nodes pull the image: IfNotPresent, Always or Never",
    "pull_secrets": "names of Secrets for pulling the image, comma-separated",
    "workers": "number of worker pods",
    "cpus": "CPUs of each worker pod, one for each rank",
    "memory": "memory of each worker pod, with its unit (Gi: 2^30 bytes, G: 10^9)",
    "head_cpus": "CPUs of the head pod",
    "head_memory": "memory of the head pod",
    "storage": "disk space of each pod, for logs and spilled objects",
    "node_selector": "labels of nodes for worker pods: zone=a,disk=ssd",
    "tolerations": "taints that worker pods tolerate: hpc=yes:NoSchedule,gpu:NoExecute",
    "head_node_selector": "labels of nodes for the head pod",
    "head_tolerations": "taints that the head pod tolerates",
    "autoscale": "scale between 0 and --workers pods with the demand of gangs",
    "idle_timeout_s": "with --autoscale: seconds after which an idle pod is removed",
    "gang": "scheduler that starts all pods or none",
    "queue": "queue of that scheduler",
    "host_network": "worker pods use the network of their node, one pod per node",
    "rdma_resource": "with --host-network: name of the RDMA devices in the device plugin",
    "network_policy": "limit traffic by NetworkPolicies (default, except with --host-network)",
    "operator_namespace": "namespace of KubeRay's operator",
    "api_server": "with --autoscale: networks of the Kubernetes API server, as 10.0.0.1/32",
    "gateway": "start a gateway on the head, for clients without Ray",
    "gateway_networks": "with --gateway: networks of its clients, as 192.0.2.0/24",
    "monitoring": "create a ServiceMonitor, a PodMonitor and a Grafana dashboard",
    "monitoring_namespace": "with --monitoring: namespace of Prometheus",
    "job": "shell command: render a RayJob, which creates the cluster, runs the command and ends",
}


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """A Ray cluster with gangs, on Kubernetes.

    Parameters
    ----------
    name, namespace : str
        Of the RayCluster or RayJob; DNS labels.
    image : str
        An image with alchemist-on-ray, tini, bash and a user with id 1000. It needs a tag or
        digest other than `latest`.
    pull_policy : {"IfNotPresent", "Always", "Never"}
    pull_secrets : str
        Names of Secrets with which nodes pull the image, comma-separated.
    workers : int
        Worker pods. Each has room for as many ranks as it has CPUs.
    cpus : int
        CPUs of each worker pod. Whole CPUs let a kubelet with the static CPU manager give ranks
        exclusive cores.
    memory : str
        Memory limit of each worker pod, a Kubernetes quantity. It covers everything in the pod:
        ranks, object store and /dev/shm.
    head_cpus, head_memory : str
        CPUs and memory of the head pod, which runs no ranks.
    storage : str
        Disk space of each pod, a Kubernetes quantity: Ray's logs and spilled objects in /tmp.
        A pod that exceeds it is evicted.
    node_selector, head_node_selector : str
        Labels of the nodes that worker pods and the head pod may run on: ``key=value``,
        comma-separated.
    tolerations, head_tolerations : str
        Taints that they tolerate: ``key=value:effect`` or ``key:effect``, comma-separated.
    autoscale : bool
        Scale between 0 and `workers` pods with the demand of gangs. Default: always `workers`.
    idle_timeout_s : int
        Seconds after which the autoscaler removes an idle pod.
    gang : str, optional
        One of `GANG_SCHEDULERS`, which schedules all pods or none.
    queue : str, optional
        Queue of the gang scheduler. Default: see `QUEUES`.
    host_network : bool
        Worker pods use the network of their node, one pod per node.
    rdma_resource : str, optional
        Resource name of the RDMA devices in the device plugin; requires `host_network`.
    network_policy : bool, optional
        Isolate the pods with NetworkPolicies. Default: True, but False with `host_network`:
        policies do not apply to pods on the network of their node.
    operator_namespace : str
        Namespace of KubeRay's operator, which the policy admits to the dashboard port.
    api_server : str
        Networks of the Kubernetes API server, comma-separated, that the policy opens to the
        autoscaler. Default: all private IPv4 networks.
    gateway : bool
        Start a gateway on the head, for clients without Ray. Its tokens are in a Secret.
    gateway_networks : str
        Networks of those clients, comma-separated, that the policy admits. Default: all private
        IPv4 networks.
    monitoring : bool
        Create a ServiceMonitor, a PodMonitor and a Grafana dashboard for the Prometheus operator.
    monitoring_namespace : str
        Namespace of Prometheus, which the policy admits to the metrics ports.
    job : str, optional
        Shell command. Render a RayJob, which creates the cluster, runs the command and ends.

    Raises
    ------
    ValueError
        For an invalid value or combination; the message names the option.
    """

    name: str = "alchemist"
    namespace: str = "alchemist"
    image: str = IMAGE
    pull_policy: str = "IfNotPresent"
    pull_secrets: str = ""
    workers: int = 2
    cpus: int = 4
    memory: str = "16Gi"
    head_cpus: str = "2"
    head_memory: str = "8Gi"
    storage: str = "8Gi"
    node_selector: str = ""
    tolerations: str = ""
    head_node_selector: str = ""
    head_tolerations: str = ""
    autoscale: bool = False
    idle_timeout_s: int = 60
    gang: str | None = None
    queue: str | None = None
    host_network: bool = False
    rdma_resource: str | None = None
    network_policy: bool | None = None
    operator_namespace: str = "default"
    api_server: str = ",".join(PRIVATE_NETWORKS)
    gateway: bool = False
    gateway_networks: str = ",".join(PRIVATE_NETWORKS)
    monitoring: bool = False
    monitoring_namespace: str = "monitoring"
    job: str | None = None

    def __post_init__(self) -> None:
        limit = CLUSTER_NAME_LIMIT if self.job is None else JOB_NAME_LIMIT
        _check_name("name", self.name, limit)
        for option in ("namespace", "operator_namespace", "monitoring_namespace"):
            _check_name(option, getattr(self, option), NAMESPACE_LIMIT)
        tag = self.image.rpartition("/")[2].partition(":")[2]
        if not tag or tag == "latest":
            raise ValueError(
                f"--image {self.image}: name a version (repository/name:tag or @sha256:...): all "
                "pods of a cluster must run the same image, including pods that start later"
            )
        for option, number in (
            ("workers", self.workers),
            ("cpus", self.cpus),
            ("idle_timeout_s", self.idle_timeout_s),
        ):
            if number < 1:
                raise ValueError(f"{flag_of(option)} {number}: it must be at least 1")
        for option in ("memory", "head_memory", "storage"):
            text = getattr(self, option)
            if (nbytes := quantity_bytes(text, option)) < GIB:
                hint = f"give a unit, e.g. {text}Gi" if text.isdigit() else "give 1Gi or more"
                raise ValueError(
                    f"{flag_of(option)} {text} is {readable(nbytes)}, too little for Ray and its "
                    f"object store: {hint}"
                )
        for network in self.api_networks:
            _check_network("api_server", network)
        for network in self.client_networks:
            _check_network("gateway_networks", network)
        for name in parts(self.pull_secrets):
            _check_name("pull_secrets", name, NAMESPACE_LIMIT)
        for option in ("node_selector", "head_node_selector", "tolerations", "head_tolerations"):
            self.node_choice(option)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.gang is not None and self.gang not in GANG_SCHEDULERS:
            raise ValueError(
                f"--gang must be one of {', '.join(GANG_SCHEDULERS)}; got {self.gang!r}"
            )
        if self.gang is not None and self.autoscale:
            raise ValueError(
                "--gang and --autoscale exclude each other: a gang scheduler admits all pods of a "
                "cluster at once, the autoscaler requests them one by one. Choose one"
            )
        if self.gang == "scheduler-plugins" and self.job is not None:
            raise ValueError(
                "--gang scheduler-plugins with --job: KubeRay 1.6 refuses RayJobs under it. Use "
                "another gang scheduler, or a RayCluster and `ray job submit`"
            )
        if self.queue is not None and self.gang not in QUEUES:
            raise ValueError(f"--queue {self.queue}: only {', '.join(QUEUES)} have queues")
        if self.rdma_resource is not None and not self.host_network:
            raise ValueError("--rdma-resource needs --host-network: the devices belong to the node")
        if self.host_network and self.network_policy:
            raise ValueError(
                "--network-policy does not apply to pods on the network of their node: leave it "
                "out and protect the nodes with a firewall"
            )

    @property
    def is_isolated(self) -> bool:
        """Whether NetworkPolicies surround the pods."""
        return not self.host_network if self.network_policy is None else self.network_policy

    @property
    def api_networks(self) -> list[str]:
        """Networks in which the Kubernetes API server is."""
        return parts(self.api_server)

    @property
    def client_networks(self) -> list[str]:
        """Networks of the gateway's clients."""
        return parts(self.gateway_networks)

    @property
    def object_store_bytes(self) -> tuple[int, int]:
        """Sizes of the head's object store and of a worker's."""
        head = quantity_bytes(self.head_memory, "head_memory")
        worker = quantity_bytes(self.memory, "memory")
        return head * OBJECT_STORE_TENTHS // 10, worker * OBJECT_STORE_TENTHS // 10

    def node_choice(self, option: str) -> dict[str, str] | list[dict[str, str]]:
        """An option that chooses nodes, as a pod has it. Raises `ValueError`."""
        text = getattr(self, option)
        return _labels(text, option) if "selector" in option else _tolerations(text, option)

    @property
    def queue_name(self) -> str:
        """Queue of the gang scheduler."""
        return self.queue or QUEUES.get(self.gang or "", "")


def parts(text: str) -> list[str]:
    """Split a comma-separated option."""
    return [part.strip() for part in text.split(",")] if text else []


def _labels(text: str, option: str) -> dict[str, str]:
    """Convert ``key=value,...``. Raises `ValueError`, which names the option."""
    found = {}
    for part in parts(text):
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise ValueError(f"{flag_of(option)} {part!r}: give labels like zone=a,disk=ssd")
        found[key] = value
    return found


def _tolerations(text: str, option: str) -> list[dict[str, str]]:
    """Convert ``key=value:effect,...``. Raises `ValueError`, which names the option."""
    found = []
    for part in parts(text):
        taint, _, effect = part.rpartition(":")
        key, equals, value = taint.partition("=")
        if not key or effect not in EFFECTS:
            raise ValueError(
                f"{flag_of(option)} {part!r}: give taints like hpc=yes:NoSchedule, with one of "
                f"the effects {', '.join(EFFECTS)}"
            )
        match = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        found.append({"key": key, **match, "effect": effect})
    return found


def quantity_bytes(text: str, option: str) -> int:
    """Convert a Kubernetes quantity (``8Gi``). Raises `ValueError`, which names the option."""
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise ValueError(f"{flag_of(option)} {error}") from None


def flag_of(option: str) -> str:
    """Format ``head_memory`` as ``--head-memory``."""
    return f"--{option.replace('_', '-')}"


def _check_name(option: str, value: str, limit: int) -> None:
    if not NAME.fullmatch(value) or len(value) > limit:
        raise ValueError(
            f"{flag_of(option)} {value!r}: it must have at most {limit} characters a-z, 0-9 and -, "
            "begin with a letter and not end with -"
        )


def _check_network(option: str, text: str) -> None:
    try:
        prefix = ipaddress.ip_network(text).prefixlen
    except ValueError as error:
        flag = flag_of(option)
        raise ValueError(f"{flag} {text}: {error}; give networks like 10.0.0.1/32") from None
    if prefix == 0:
        raise ValueError(f"{flag_of(option)} {text}: it must not be the whole Internet")
