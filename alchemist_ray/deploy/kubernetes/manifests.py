"""Options -> Kubernetes objects, as plain maps in the order in which they are applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from alchemist_ray.deploy.kubernetes.options import RAY_VERSION, ClusterOptions, parts
from alchemist_ray.gateway.protocol import PORT


def make_object(o: ClusterOptions, api: str, kind: str, name: str, **fields: Any) -> Map:
    """Return an object in the cluster's namespace, with its labels."""
    labels = {
        "app.kubernetes.io/part-of": "alchemist-on-ray",
        "app.kubernetes.io/instance": o.name,
    }
    metadata: Map = {"name": name, "namespace": o.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def members(o: ClusterOptions, *components: str) -> Map:
    """Return a selector of the cluster's pods with one of these components."""
    return {
        "matchLabels": {"app.kubernetes.io/instance": o.name},
        "matchExpressions": [
            {
                "key": "app.kubernetes.io/component",
                "operator": "In",
                "values": list(components),
            }
        ],
    }


# Fixed ports, for firewalls. The ports of a gang are any free ones, from pod to pod.
RAY_PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "runtime-env-agent-port": 6382,
    "dashboard-agent-grpc-port": 6383,
    "dashboard-agent-listen-port": 52365,
    "metrics-export-port": 8080,
    "min-worker-port": 11000,
    "max-worker-port": 11999,
}
HEAD_PORTS = {
    "gcs-server": 6379,
    "dashboard": 8265,
    "metrics": 8080,
    "as-metrics": 44217,
    "dash-metrics": 44227,
}
WORKER_PORTS = {"metrics": 8080}
DASHBOARD = Path(__file__).with_name("dashboard.json")  # for Grafana
HEALTH = {"path": "/api/healthz", "port": RAY_PORTS["dashboard-agent-listen-port"]}
USER = 1000
KILL_S = 30  # Kubernetes kills a pod that takes longer to end; ours take DRAIN_S and 2 s
DRAIN_S = 5  # Ray waits this long for an ending pod to become idle; a pod with an agent never does
# Ray first (tini passes the signal on), which stops new work; then the proxies, which report the
# reason to their gangs.
PRE_STOP = (
    'kill -TERM 1; sleep 1; for pid in /tmp/alchemist-*/pid; do [ -f "$pid" ] && kill -TERM '
    '"$(<"$pid")"; done; sleep 1'
)
# KubeRay sets the variable to `ray start ...`. tini stays process 1: it reaps ranks that lost
# their proxy, which Ray does not.
START = 'ulimit -n 65536; eval exec "$KUBERAY_GEN_RAY_START_CMD"'
# In the background until Ray listens; then Ray starts it again where that is needed.
GATEWAY_FOLDER = "/var/run/secrets/alchemist-gateway"
START_GATEWAY = f"""\
files=({GATEWAY_FOLDER}/tls.*)
until alchemist gateway --port {PORT} --tokens {GATEWAY_FOLDER}/tokens.json \\
  ${{files[1]:+--certfile "${{files[0]}}" --keyfile "${{files[1]}}"}}; do sleep 5; done &
"""
TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
TOKEN_LIFETIME_S = 3607  # Kubernetes' own value for such tokens; the kubelet renews them
SMALL_STORAGE = "1Gi"


def labels(o: ClusterOptions, component: str) -> Map:
    """Labels of a pod. Our selectors use them: KubeRay invents the name of a job's cluster."""
    return {
        "app.kubernetes.io/part-of": "alchemist-on-ray",
        "app.kubernetes.io/instance": o.name,
        "app.kubernetes.io/component": component,
    }


def pod_security() -> Map:
    """Return the security context of a pod: an ordinary user."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, lock_memory: bool = False) -> Map:
    """Return the security context of a container: no privileges; RDMA needs to lock memory."""
    capabilities: Map = {"drop": ["ALL"]}
    if lock_memory:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": capabilities,
    }


def guaranteed(cpu: str, memory: str, storage: str, **more: str) -> Map:
    """Return resources whose limits equal the requests: the pod keeps its cores and memory."""
    resources = {"cpu": cpu, "memory": memory, "ephemeral-storage": storage, **more}
    return {"requests": dict(resources), "limits": dict(resources)}


def scratch(name: str, storage: str) -> Map:
    """Return a volume for temporary files."""
    return {"name": name, "emptyDir": {"sizeLimit": storage}}


def _probe(period_s: int, failures: int) -> Map:
    return {
        "httpGet": dict(HEALTH),
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _container(o: ClusterOptions, name: str, cpus: str, memory: str, ports: Map) -> Map:
    rdma = o.rdma_resource if name == "ray-worker" else None
    devices = {} if rdma is None else {rdma: "1"}
    env = {
        "HOME": "/tmp",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S),
    }
    if o.autoscale:
        env["ALCHEMIST_GROWS_TO"] = f"{o.workers}x{o.cpus}"
    return {
        "name": name,
        "image": o.image,
        "imagePullPolicy": o.pull_policy,
        "command": ["tini", "--", "/bin/bash", "-c"],
        "args": [START],
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "ports": [{"name": key, "containerPort": port} for key, port in ports.items()],
        "resources": guaranteed(cpus, memory, o.storage, **devices),
        "startupProbe": _probe(5, 60),
        "readinessProbe": _probe(5, 10),
        "livenessProbe": _probe(10, 30),  # patient: a pod whose ranks use every core answers late
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/bash", "-c", PRE_STOP]}}},
        "securityContext": container_security(lock_memory=rdma is not None),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _template(o: ClusterOptions, component: str, container: Map, storage: str, **more: Any) -> Map:
    option = "" if component == "worker" else "head_"
    choice = {
        "imagePullSecrets": [{"name": name} for name in parts(o.pull_secrets)],
        "nodeSelector": o.node_choice(f"{option}node_selector"),
        "tolerations": o.node_choice(f"{option}tolerations"),
    }
    return {
        "metadata": {"labels": labels(o, component)},
        "spec": {
            **{key: value for key, value in choice.items() if value},
            "serviceAccountName": o.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": KILL_S,
            "securityContext": pod_security(),
            "containers": [container],
            "volumes": [scratch("tmp", storage)],
            **more,
        },
    }


def _start_params(cpus: int, store_bytes: int, **more: str) -> Map:
    ports = {key: str(port) for key, port in RAY_PORTS.items()}
    return {"num-cpus": str(cpus), "object-store-memory": str(store_bytes), **ports, **more}


def head_group(o: ClusterOptions) -> Map:
    """Return the head: Ray's control plane, the Driver and users' main programs; no ranks."""
    container = _container(o, "ray-head", o.head_cpus, o.head_memory, HEAD_PORTS)
    template = _template(o, "head", container, o.storage)
    if o.gateway:
        _add_gateway(o, container, template["spec"]["volumes"])
    if o.autoscale:
        # KubeRay grants this account the right to resize the cluster.
        template["spec"]["serviceAccountName"] = f"{o.name}-autoscaler"
        template["spec"]["volumes"] += [scratch("autoscaler-tmp", SMALL_STORAGE), _token_volume()]
    params = _start_params(0, o.object_store_bytes[0], **{"dashboard-host": "0.0.0.0"})
    return {"serviceType": "ClusterIP", "rayStartParams": params, "template": template}


def _add_gateway(o: ClusterOptions, container: Map, volumes: list[Map]) -> None:
    """Start a gateway in the head's container; its tokens may be created later."""
    container["args"] = [START_GATEWAY + START]
    container["ports"].append({"name": "gateway", "containerPort": PORT})
    secret = {"secretName": f"{o.name}-gateway", "optional": True, "defaultMode": 0o440}
    volumes.append({"name": "gateway", "secret": secret})
    container["volumeMounts"].append(
        {"name": "gateway", "mountPath": GATEWAY_FOLDER, "readOnly": True}
    )


def _token_volume() -> Map:
    """Return the files of a service account, for the container of the autoscaler only.

    Kubernetes' own mount would give them to all containers of the head, users' programs included.
    """
    token = {"path": "token", "expirationSeconds": TOKEN_LIFETIME_S}
    authority = {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    sources: list[Map] = [
        {"serviceAccountToken": token},
        {"configMap": authority},
        {"downwardAPI": {"items": [namespace]}},
    ]
    return {"name": "autoscaler-token", "projected": {"sources": sources}}


def autoscaler(o: ClusterOptions) -> Map:
    """Return options of the container that KubeRay adds to the head."""
    return {
        "version": "v2",
        "idleTimeoutSeconds": o.idle_timeout_s,
        "imagePullPolicy": o.pull_policy,
        "resources": guaranteed("500m", "1Gi", SMALL_STORAGE),
        "securityContext": container_security(),
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [
            {"name": "autoscaler-tmp", "mountPath": "/tmp"},
            {"name": "autoscaler-token", "mountPath": TOKEN_FOLDER, "readOnly": True},
        ],
    }


def worker_group(o: ClusterOptions) -> Map:
    """Return the pods of the ranks. They prefer one zone: MPI between zones is slow."""
    container = _container(o, "ray-worker", str(o.cpus), o.memory, WORKER_PORTS)
    workers = {"matchLabels": labels(o, "worker")}
    same_zone = {"labelSelector": workers, "topologyKey": "topology.kubernetes.io/zone"}
    affinity: Map = {
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": same_zone}
            ]
        }
    }
    more: Map = {"affinity": affinity}
    if o.host_network:  # Ray's ports are the node's: one pod per node
        same_node = {"labelSelector": workers, "topologyKey": "kubernetes.io/hostname"}
        affinity["podAntiAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": [same_node]
        }
        more |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    least = 0 if o.autoscale else o.workers
    return {
        "groupName": "mpi",
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": o.workers,
        "rayStartParams": _start_params(o.cpus, o.object_store_bytes[1]),
        "template": _template(o, "worker", container, o.storage, **more),
    }


def submitter(o: ClusterOptions) -> Map:
    """Return the pod that submits the command of a RayJob to the head and shows its output."""
    container = {
        "name": "ray-job-submitter",
        "image": o.image,
        "imagePullPolicy": o.pull_policy,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": guaranteed("500m", "512Mi", SMALL_STORAGE),
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    template = _template(o, "submitter", container, SMALL_STORAGE, restartPolicy="Never")
    del template["spec"]["terminationGracePeriodSeconds"]
    return template


DNS_PORT = 53
API_PORTS = (443, 6443)
METRICS_PORTS = ("metrics", "as-metrics", "dash-metrics")


def network_policies(o: ClusterOptions) -> list[Map]:
    """Return the policies: the cluster's pods reach each other and little else.

    Pods of the cluster reach each other on all ports, because a gang's ports are any free ones.
    KubeRay's operator and the submitter of a job reach the dashboard port, Prometheus the metrics
    ports, clients the gateway's port, and the pods the cluster's DNS server. All other traffic is
    refused, in and out.

    Namespaces are selected by ``kubernetes.io/metadata.name``, a label that the API server sets.
    """
    policies = [_cluster_policy(o)]
    if o.autoscale:
        policies.append(_autoscaler_policy(o))
    if o.gateway:
        policies.append(_gateway_policy(o))
    return policies


def _cluster_policy(o: ClusterOptions) -> Map:
    cluster = {"podSelector": members(o, "head", "worker")}
    ingress: list[Map] = [
        {"from": [cluster]},
        {
            "from": [
                _pods_in(o.operator_namespace, {"app.kubernetes.io/component": "kuberay-operator"}),
                {"podSelector": members(o, "submitter")},
            ],
            "ports": _ports(HEAD_PORTS["dashboard"]),
        },
    ]
    if o.monitoring:
        ports = _ports(*(HEAD_PORTS[name] for name in METRICS_PORTS))
        ingress.append({"from": [_pods_in(o.monitoring_namespace)], "ports": ports})
    dns = {
        "to": [_pods_in("kube-system", {"k8s-app": "kube-dns"})],
        "ports": [*_ports(DNS_PORT, protocol="UDP"), *_ports(DNS_PORT)],
    }
    spec = {
        **cluster,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [{"to": [cluster]}, dns],
    }
    return make_object(o, "networking.k8s.io/v1", "NetworkPolicy", o.name, spec=spec)


def _autoscaler_policy(o: ClusterOptions) -> Map:
    """Return the head's way to the Kubernetes API, which has no labels: only an address."""
    to = [{"ipBlock": {"cidr": network}} for network in o.api_networks]
    spec = {
        "podSelector": members(o, "head"),
        "policyTypes": ["Egress"],
        "egress": [{"to": to, "ports": _ports(*API_PORTS)}],
    }
    name = f"{o.name}-autoscaler"
    return make_object(o, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def _gateway_policy(o: ClusterOptions) -> Map:
    clients = [{"ipBlock": {"cidr": network}} for network in o.client_networks]
    spec = {
        "podSelector": members(o, "head"),
        "policyTypes": ["Ingress"],
        "ingress": [{"from": clients, "ports": _ports(PORT)}],
    }
    name = f"{o.name}-gateway"
    return make_object(o, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def _pods_in(namespace: str, labels: Map | None = None) -> Map:
    peer: Map = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    if labels is not None:
        peer["podSelector"] = {"matchLabels": labels}
    return peer


def _ports(*numbers: int, protocol: str = "TCP") -> list[Map]:
    return [{"protocol": protocol, "port": number} for number in numbers]


Map = dict[str, Any]
JOB_TTL_S = 60  # a finished job's cluster stays this long, for inspection


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _write_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def manifests(o: ClusterOptions) -> list[Map]:
    """Return all objects that the options ask for."""
    found = [namespace(o), *accounts(o), ray_cluster(o) if o.job is None else ray_job(o)]
    found.append(disruption_budget(o))
    if o.is_isolated:
        found += network_policies(o)
    if o.monitoring:
        found += monitors(o)
    return found


def to_yaml(objects: list[Map]) -> str:
    """Return one YAML stream."""
    text: str = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False)
    return text


def namespace(o: ClusterOptions) -> Map:
    """Return the namespace, in which Kubernetes refuses privileged pods."""
    level = "privileged" if o.host_network else "restricted"
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": o.namespace,
            "labels": {"pod-security.kubernetes.io/enforce": level},
        },
    }


def accounts(o: ClusterOptions) -> list[Map]:
    """Return service accounts without rights; KubeRay binds a role to the autoscaler's."""
    names = [o.name, f"{o.name}-autoscaler"] if o.autoscale else [o.name]
    return [
        make_object(o, "v1", "ServiceAccount", name, automountServiceAccountToken=False)
        for name in names
    ]


def cluster_spec(o: ClusterOptions) -> Map:
    """Return the specification of the cluster, for a RayCluster or within a RayJob."""
    spec: Map = {"rayVersion": RAY_VERSION, "authOptions": {"mode": "token"}}
    if o.autoscale:
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = autoscaler(o)
    spec["headGroupSpec"] = head_group(o)
    spec["workerGroupSpecs"] = [worker_group(o)]
    return spec


def _with_scheduler(o: ClusterOptions, owner: Map) -> Map:
    """Add the labels by which a gang scheduler finds a RayCluster or RayJob."""
    by_scheduler: dict[str | None, Map] = {
        "scheduler-plugins": {"ray.io/gang-scheduling-enabled": "true"},
        "volcano": {"volcano.sh/queue-name": o.queue_name},
        "yunikorn": {
            "ray.io/gang-scheduling-enabled": "true",
            "yunikorn.apache.org/app-id": o.name,
            "yunikorn.apache.org/queue": o.queue_name,
        },
        "kueue": {"kueue.x-k8s.io/queue-name": o.queue_name},
    }
    owner["metadata"]["labels"] |= by_scheduler.get(o.gang, {})
    # KubeRay keeps our command, with tini as process 1 (see pods.START).
    owner["metadata"]["annotations"] = {"ray.io/overwrite-container-cmd": "true"}
    return owner


def ray_cluster(o: ClusterOptions) -> Map:
    """Return a cluster that exists until it is deleted."""
    return _with_scheduler(
        o, make_object(o, "ray.io/v1", "RayCluster", o.name, spec=cluster_spec(o))
    )


def ray_job(o: ClusterOptions) -> Map:
    """Return a cluster for one command, deleted after it."""
    spec: Map = {
        "entrypoint": o.job,
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": JOB_TTL_S,
        "backoffLimit": 0,
        "submitterPodTemplate": submitter(o),
        "rayClusterSpec": cluster_spec(o),
    }
    return _with_scheduler(o, make_object(o, "ray.io/v1", "RayJob", o.name, spec=spec))


def disruption_budget(o: ClusterOptions) -> Map:
    """Return the budget that refuses voluntary evictions: they would end every gang on the pod.

    With `autoscale` it protects the head only. Workers are optional then, and nodes with workers
    can be drained. The numbers are absolute: a RayCluster has no scale subresource, which
    percentages need.
    """
    components = ("head",) if o.autoscale else ("head", "worker")
    spec = {
        "minAvailable": 1 if o.autoscale else o.workers + 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": members(o, *components),
    }
    return make_object(o, "policy/v1", "PodDisruptionBudget", o.name, spec=spec)


def monitors(o: ClusterOptions) -> list[Map]:
    """Return objects for the Prometheus operator and for the side-car of Grafana."""
    service = {
        "selector": {"matchLabels": {"ray.io/node-type": "head"}},
        "endpoints": [{"port": name} for name in METRICS_PORTS],
    }
    pods = {
        "selector": {"matchLabels": labels(o, "worker")},
        "podMetricsEndpoints": [{"port": "metrics"}],
    }
    data = {"alchemist.json": DASHBOARD.read_text()}
    board = make_object(o, "v1", "ConfigMap", f"{o.name}-dashboard", data=data)
    board["metadata"]["labels"]["grafana_dashboard"] = "1"
    api = "monitoring.coreos.com/v1"
    return [
        make_object(o, api, "ServiceMonitor", f"{o.name}-head", spec=service),
        make_object(o, api, "PodMonitor", f"{o.name}-workers", spec=pods),
        board,
    ]
