"""The control plane: etcd, the API server, its controllers and a scheduler that knows gangs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kube.credentials import PORT
from tests.kube.sandbox import NODE_IP, Sandbox
from tests.support import traces

PODS = "10.244.0.0/16"
SERVICES = "10.96.0.0/16"
UP_S = 180.0
ETCD = "http://127.0.0.1:2379"
PEER = "http://127.0.0.1:2380"
RETRY_S = 20  # Kubernetes has 300
GANG_SCHEDULER = "scheduler-plugins-scheduler"  # as KubeRay calls it


def start(sandbox: Sandbox, binary: Path) -> None:
    """All of it; returns when the API server is ready. Raises `RuntimeError` if it is not."""
    keys = sandbox.folder / "keys"
    sandbox.start(
        *("etcd", "etcd", "--data-dir", sandbox.folder / "etcd", "--unsafe-no-fsync"),
        *("--listen-client-urls", ETCD, "--advertise-client-urls", ETCD, "--log-level", "warn"),
        *("--listen-peer-urls", PEER, "--initial-advertise-peer-urls", PEER),
        *("--initial-cluster", f"default={PEER}"),
    )
    sandbox.start(
        "kube-apiserver",
        *(binary, "kube-apiserver", f"--etcd-servers={ETCD}", f"--secure-port={PORT}"),
        *("--bind-address=0.0.0.0", f"--advertise-address={NODE_IP}"),
        "--kubelet-preferred-address-types=InternalIP",
        *(f"--tls-cert-file={keys}/api.crt", f"--tls-private-key-file={keys}/api.key"),
        *(f"--client-ca-file={keys}/ca.crt", f"--token-auth-file={keys}/tokens.csv"),
        f"--service-account-key-file={keys}/sa.key",
        f"--service-account-signing-key-file={keys}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-cluster-ip-range={SERVICES}",
        *("--authorization-mode=Node,RBAC", "--allow-privileged=true"),
    )
    wait_until_ready(sandbox, binary)
    sandbox.start(
        "kube-controller-manager",
        *(binary, "kube-controller-manager", f"--kubeconfig={keys}/controllers.kubeconfig"),
        f"--service-account-private-key-file={keys}/sa.key",
        *(f"--root-ca-file={keys}/ca.crt", "--use-service-account-credentials=true"),
        *("--allocate-node-cidrs=true", f"--cluster-cidr={PODS}"),
        *("--leader-elect=false", "--bind-address=127.0.0.1"),
    )
    (sandbox.folder / "scheduler.json").write_text(json.dumps(_profiles(keys)))
    sandbox.start(
        *("kube-scheduler", binary, "kube-scheduler", "--bind-address=127.0.0.1"),
        f"--config={sandbox.folder}/scheduler.json",
        # What coscheduling has refused is not woken by room that becomes free, but by this.
        f"--pod-max-in-unschedulable-pods-duration={RETRY_S}s",
    )


def wait_until_ready(sandbox: Sandbox, binary: Path) -> None:
    """Wait for the API server."""
    config = str(sandbox.folder / "keys" / "admin.kubeconfig")
    ask = (binary, "kubectl", "get", "--raw", "/readyz")

    def ready() -> bool:
        sandbox.check()
        return sandbox.run(*ask, code=None, KUBECONFIG=config).strip() == "ok"

    if traces.wait_until(ready, UP_S, 0.5) is None:
        said = sandbox.said("kube-apiserver")
        raise RuntimeError(f"the API server is not ready after {UP_S:.0f} s:\n{said}")


def _profiles(keys: Path) -> dict[str, object]:
    """The usual scheduler, and beside it (under KubeRay's name for it) the one that knows gangs.

    One process, so one queue: both must order it alike.
    """
    profile = {
        "plugins": {
            "multiPoint": {"enabled": [{"name": "Coscheduling"}]},
            "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]},
        },
        "pluginConfig": [{"name": "Coscheduling", "args": {
            "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "CoschedulingArgs",
            "permitWaitingTimeSeconds": 20, "podGroupBackoffSeconds": 2,
        }}],
    }  # fmt: skip
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": f"{keys}/scheduler.kubeconfig"},
        "profiles": [
            {"schedulerName": name, **profile} for name in ("default-scheduler", GANG_SCHEDULER)
        ],
    }
