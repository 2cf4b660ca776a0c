"""The pods of a cluster: how Ray's head and workers run in them."""

from __future__ import annotations

from typing import Any

from alchemist_ray.deploy.kubernetes.options import ClusterOptions

Map = dict[str, Any]

# Fixed, so that firewalls can be told; a gang's own ports are any free ones, pod to pod.
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
HEALTH = {"path": "/api/healthz", "port": RAY_PORTS["dashboard-agent-listen-port"]}
USER = 1000
GRACE_S = 30  # after which Kubernetes kills; a pod is gone in DRAIN_S and a bit
DRAIN_S = 5  # how long Ray waits for a pod that is told to go to fall idle, which ours do not
# Ray is told first (tini passes it on), so that nothing new comes to this pod; then proxies, each
# of which says why its gang is about to end.
FAREWELL = (
    'kill -TERM 1; sleep 1; for pid in /tmp/alchemist-*/pid; do [ -f "$pid" ] && kill -TERM '
    '"$(<"$pid")"; done; sleep 1'
)
# KubeRay makes `ray start ...`; tini stays process 1, because ranks whose proxy has died are
# nobody's children then, and must be reaped.
START = 'ulimit -n 65536; eval exec "$KUBERAY_GEN_RAY_START_CMD"'


def labels(o: ClusterOptions, component: str) -> Map:
    """Of a pod: by these our objects find it, also where KubeRay makes up the cluster's name."""
    return {
        "app.kubernetes.io/part-of": "alchemist-on-ray",
        "app.kubernetes.io/instance": o.name,
        "app.kubernetes.io/component": component,
    }


def pod_security(o: ClusterOptions) -> Map:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, lock_memory: bool = False) -> Map:
    """Nothing is allowed; RDMA alone needs memory that stays where it is."""
    capabilities: Map = {"drop": ["ALL"]}
    if lock_memory:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": capabilities,
    }


def _probe(period_s: int, failures: int) -> Map:
    return {
        "httpGet": dict(HEALTH),
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _container(o: ClusterOptions, name: str, cpus: str, memory: str, ports: Map) -> Map:
    rdma = o.rdma_resource if name == "ray-worker" else None
    resources: Map = {"cpu": cpus, "memory": memory}
    if rdma is not None:
        resources[rdma] = "1"
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
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "startupProbe": _probe(5, 60),
        "readinessProbe": _probe(5, 10),
        "livenessProbe": _probe(10, 30),
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/bash", "-c", FAREWELL]}}},
        "securityContext": container_security(lock_memory=rdma is not None),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _template(o: ClusterOptions, component: str, account: str, container: Map, **more: Any) -> Map:
    return {
        "metadata": {"labels": labels(o, component)},
        "spec": {
            "serviceAccountName": account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_S,
            "securityContext": pod_security(o),
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            **more,
        },
    }


def _start_params(cpus: int, store_bytes: int, **more: str) -> Map:
    ports = {key: str(port) for key, port in RAY_PORTS.items()}
    return {"num-cpus": str(cpus), "object-store-memory": str(store_bytes), **ports, **more}


def head_group(o: ClusterOptions) -> Map:
    """The head: Ray's control plane, the Driver and users' main programs; never ranks."""
    container = _container(o, "ray-head", o.head_cpus, o.head_memory, HEAD_PORTS)
    template = _template(o, "head", o.name, container)
    if o.autoscale:
        # KubeRay gives this account leave to change the cluster's size.
        template["spec"]["serviceAccountName"] = f"{o.name}-autoscaler"
        template["spec"]["automountServiceAccountToken"] = True
        template["spec"]["volumes"].append({"name": "autoscaler-tmp", "emptyDir": {}})
    params = _start_params(0, o.object_store_bytes[0], **{"dashboard-host": "0.0.0.0"})
    return {"serviceType": "ClusterIP", "rayStartParams": params, "template": template}


def worker_group(o: ClusterOptions) -> Map:
    """Pods that ranks run in: limits equal requests, so that a rank's CPU is its own."""
    container = _container(o, "ray-worker", str(o.cpus), o.memory, WORKER_PORTS)
    mates = {"matchLabels": labels(o, "worker")}
    near = {"labelSelector": mates, "topologyKey": "topology.kubernetes.io/zone"}
    affinity: Map = {
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": near}
            ]
        }
    }
    more: Map = {"affinity": affinity}
    if o.host_network:
        apart = {"labelSelector": mates, "topologyKey": "kubernetes.io/hostname"}
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
        more |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    least = 0 if o.autoscale else o.workers
    return {
        "groupName": "mpi",
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": o.workers,
        "rayStartParams": _start_params(o.cpus, o.object_store_bytes[1]),
        "template": _template(o, "worker", o.name, container, **more),
    }


def submitter(o: ClusterOptions) -> Map:
    """The pod that hands a RayJob's command to the head and shows what it prints."""
    small = {"cpu": "500m", "memory": "512Mi"}
    container = {
        "name": "ray-job-submitter",
        "image": o.image,
        "imagePullPolicy": o.pull_policy,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": small, "limits": dict(small)},
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    template = _template(o, "submitter", o.name, container, restartPolicy="Never")
    del template["spec"]["terminationGracePeriodSeconds"]
    return template
