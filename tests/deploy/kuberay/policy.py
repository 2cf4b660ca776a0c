"""Rules for all of our manifests; each violation is a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from alchemist_ray.gateway.protocol import PORT
from tests.kube import enforce

Map = dict[str, Any]


def templates(objects: list[Map]) -> Iterator[tuple[str, Map]]:
    """Every pod template, with its component."""
    for o in objects:
        if o["kind"] not in ("RayCluster", "RayJob"):
            continue
        spec = o["spec"].get("rayClusterSpec", o["spec"])
        yield "head", spec["headGroupSpec"]["template"]
        for group in spec["workerGroupSpecs"]:
            yield "worker", group["template"]
        if "submitterPodTemplate" in o["spec"]:
            yield "submitter", o["spec"]["submitterPodTemplate"]


def broken(objects: list[Map]) -> list[str]:
    """The violations; none for correct manifests."""
    said = []
    for component, template in templates(objects):
        said += [f"{component}: {what}" for what in _pod(component, template["spec"])]
    said += _objects(objects)
    return said


def _holding(rules: dict[str, Any]) -> list[str]:
    """The sentences that are true."""
    return [words for words, holds in rules.items() if holds]


def _pod(component: str, pod: Map) -> Iterator[str]:
    security, net = pod.get("securityContext", {}), pod.get("hostNetwork")
    apart = pod.get("affinity", {}).get("podAntiAffinity", {})
    terms = apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    seccomp = security.get("seccompProfile", {}).get("type")
    alone = "kubernetes.io/hostname" in [term["topologyKey"] for term in terms]
    yield from _holding({
        "may run as root": not security.get("runAsNonRoot") or security.get("runAsUser", 0) == 0,
        "has no seccomp profile": seccomp != "RuntimeDefault",
        "has hostPID": pod.get("hostPID"),
        "has hostIPC": pod.get("hostIPC"),
        "two may meet on one node's network": net and not alone,
        "does not find the head's name": net and pod.get("dnsPolicy") != "ClusterFirstWithHostNet",
        "carries a service account's token": pod.get("automountServiceAccountToken") is not False,
    })  # fmt: skip
    for volume in pod.get("volumes", []):
        if set(volume) - {"name", "emptyDir", "projected", "secret"}:
            yield f"mounts {volume['name']} of the node or of others"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {volume['name']} may fill the node's disk"
    for container in pod["containers"]:
        yield from _container(component, container)


def _container(component: str, container: Map) -> list[str]:
    tag = container["image"].rpartition("/")[2].partition(":")[2]
    resources, security = container.get("resources", {}), container.get("securityContext", {})
    limits, capabilities = resources.get("limits", {}), security.get("capabilities", {})
    mounts = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
    serves = component != "submitter"
    return _holding({
        "runs whatever image is the latest": tag in ("", "latest"),
        "has no limits": not {"cpu", "memory", "ephemeral-storage"} <= set(limits),
        "asks for other than its limits": resources.get("requests") != limits,
        "may gain privileges": security.get("privileged")
        or security.get("allowPrivilegeEscalation") is not False,
        "keeps capabilities": capabilities.get("drop") != ["ALL"],
        "adds capabilities": set(capabilities.get("add", [])) - {"IPC_LOCK"},
        "may write to its image": not security.get("readOnlyRootFilesystem"),
        "has no /tmp to write to": "/tmp" not in mounts,
        **{
            f"has no {probe}": serves and probe not in container
            for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        },
        "has nobody to reap orphans": serves and container.get("command", [None])[0] != "tini",
    })  # fmt: skip


def _objects(objects: list[Map]) -> Iterator[str]:
    kinds = [o["kind"] for o in objects]
    for needed in ("ServiceAccount", "PodDisruptionBudget"):
        if needed not in kinds:
            yield f"there is no {needed}"
    pods = list(templates(objects))
    accounts = [o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"]
    for component, template in pods:
        if template["spec"].get("serviceAccountName") not in accounts:
            yield f"{component}: its service account is not in these manifests"
    for o in objects:
        yield from _one(o, objects, pods)


def _one(o: Map, objects: list[Map], pods: list[tuple[str, Map]]) -> Iterator[str]:
    kind, spec = o["kind"], o.get("spec", {})
    if kind == "Namespace":
        yield "a namespace is its site's own"
    elif kind in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"):
        yield f"{kind}: our accounts need no rights"
    elif kind in ("RayCluster", "RayJob"):
        if o["metadata"]["annotations"].get("ray.io/overwrite-container-cmd") != "true":
            yield "KubeRay would put bash in tini's place"
        yield from _cluster(spec.get("rayClusterSpec", spec))
        if kind == "RayJob" and not spec.get("shutdownAfterJobFinishes"):
            yield "the job's cluster would stay"
        if kind == "RayJob" and spec.get("submissionMode") != "K8sJobMode":
            yield "the job is not handed in by a Kubernetes job"
    elif kind == "PodDisruptionBudget":
        yield from _budget(spec, _spec_of(objects), pods)
    elif kind == "NetworkPolicy":
        yield from _network(spec, pods)


def _selected(selector: Map, pods: list[tuple[str, Map]]) -> set[str]:
    return {component for component, template in pods if selects(selector, template)}


def _budget(spec: Map, cluster: Map, pods: list[tuple[str, Map]]) -> Iterator[str]:
    groups = cluster["workerGroupSpecs"]
    needed = 1 + sum(group["minReplicas"] for group in groups)
    chosen = _selected(spec["selector"], pods)
    if chosen != ({"head", "worker"} if needed > 1 else {"head"}):
        yield f"PodDisruptionBudget: is about {sorted(chosen)}"
    if spec["minAvailable"] < needed:
        yield "PodDisruptionBudget: some pod may be evicted"


def _network(spec: Map, pods: list[tuple[str, Map]]) -> Iterator[str]:
    chosen = _selected(spec["podSelector"], pods)
    ingress = spec.get("ingress", [])
    gateway = bool(ingress) and all(
        [port["port"] for port in rule.get("ports", [])] == [PORT] for rule in ingress
    )
    both = "Ingress" in spec["policyTypes"] and not gateway
    if chosen != ({"head", "worker"} if both else {"head"}):
        yield f"NetworkPolicy: is about {sorted(chosen)}"
    for rule, peers in [
        *((rule, rule.get("from")) for rule in ingress),
        *((rule, rule.get("to")) for rule in spec.get("egress", [])),
    ]:
        if not peers:
            yield "NetworkPolicy: opens ports to everywhere"
        for peer in peers or []:
            if peer.get("ipBlock", {}).get("cidr", "").endswith("/0"):
                yield "NetworkPolicy: opens ports to everywhere"
            named = peer.get("namespaceSelector", {}).get("matchLabels", {})
            if "namespaceSelector" in peer and "kubernetes.io/metadata.name" not in named:
                yield "NetworkPolicy: trusts labels that any namespace can set"
            if ("namespaceSelector" in peer or "ipBlock" in peer) and "ports" not in rule:
                yield "NetworkPolicy: opens all ports to others"


def _spec_of(objects: list[Map]) -> Map:
    spec: Map = next(o["spec"] for o in objects if o["kind"] in ("RayCluster", "RayJob"))
    return spec.get("rayClusterSpec", spec)


def _cluster(spec: Map) -> Iterator[str]:
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "Ray asks for no token"
    head = spec["headGroupSpec"]["rayStartParams"]
    if head.get("num-cpus") != "0":
        yield "ranks may come to the head"
    groups = [head, *(group["rayStartParams"] for group in spec["workerGroupSpecs"])]
    for params in groups:
        if "plasma-directory" in params:
            yield "KubeRay would mount no /dev/shm"
        for port in ("node-manager-port", "object-manager-port", "min-worker-port"):
            if port not in params:
                yield f"{port} is any"
    for group in spec["workerGroupSpecs"]:
        sizes = {group[size] for size in ("replicas", "minReplicas", "maxReplicas")}
        if not spec.get("enableInTreeAutoscaling") and len(sizes) > 1:
            yield "the gang's group may change its size"
    if spec.get("enableInTreeAutoscaling"):
        security = spec["autoscalerOptions"].get("securityContext", {})
        if security.get("capabilities", {}).get("drop") != ["ALL"]:
            yield "the autoscaler keeps capabilities"


def selects(selector: Map, template: Map) -> bool:
    """Whether a label selector chooses a template's pods."""
    return enforce.selects(selector, template["metadata"]["labels"])
