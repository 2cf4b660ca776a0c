"""The node: containerd with our image, the kubelet, kube-proxy."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from pathlib import Path
from typing import Any

from tests.kube.credentials import NODE
from tests.kube.sandbox import NODE_IP, Sandbox
from tests.kube.server import PODS

PAUSE = "localhost/pause:1"
DNS_IP = "10.96.0.10"
SUBNET = "10.244.0.0/24"
UP_S = 60.0
CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true  # this machine may lack the right to lower it
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""
# Pods are routed, not bridged: what they say to each other passes the node's FORWARD chain.
NETWORK = {
    "cniVersion": "0.4.0", "name": "pods",
    "plugins": [{"type": "ptp", "mtu": 1500, "ipMasq": False, "ipam": {
        "type": "host-local", "ranges": [[{"subnet": SUBNET}]],
        "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "/run/cni-addresses",
    }}],
}  # fmt: skip


def _kubelet(sandbox: Sandbox) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "readOnlyPort": 0,
        "healthzPort": 0,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},  # only this network can reach it
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": sandbox.cgroup,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_IP],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1Gi"},
        "syncFrequency": "10s",
        "resolvConf": f"{sandbox.folder}/resolv.conf",
        "podLogsDir": f"{sandbox.folder}/pods",
        "singleProcessOOMKill": True,
    }


def start(sandbox: Sandbox, control_plane: Path, images: list[Path]) -> None:
    """All of it; the node is ready some seconds later. Raises `RuntimeError` if it cannot be."""
    folder, keys = sandbox.folder, sandbox.folder / "keys"
    (folder / "containerd.toml").write_text(CONTAINERD.format(folder=folder, pause=PAUSE))
    (folder / "cni").mkdir()
    (folder / "cni" / "10-pods.conflist").write_text(json.dumps(NETWORK))
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # there is no world
    (folder / "kubelet.json").write_text(json.dumps(_kubelet(sandbox)))
    sandbox.start("containerd", "containerd", "-c", folder / "containerd.toml")
    _wait_for_containerd(sandbox)
    for tar in [pause_image(control_plane / "pause", folder / "pause.tar"), *images]:
        ctr(sandbox, "image", "import", tar, limit_s=900)
    binary = control_plane / "controlplane"
    sandbox.start(
        *("kubelet", binary, "kubelet", f"--config={folder}/kubelet.json"),
        *(f"--kubeconfig={keys}/kubelet.kubeconfig", f"--hostname-override={NODE}"),
        *(f"--node-ip={NODE_IP}", f"--root-dir={folder}/kubelet"),
        f"--cert-dir={folder}/kubelet-keys",
    )
    sandbox.start(
        *("kube-proxy", binary, "kube-proxy", f"--kubeconfig={keys}/proxy.kubeconfig"),
        *(f"--hostname-override={NODE}", "--proxy-mode=iptables", f"--cluster-cidr={PODS}"),
        *("--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"),
        *("--conntrack-tcp-timeout-close-wait=0", "--healthz-bind-address=127.0.0.1:10256"),
    )


def ctr(sandbox: Sandbox, *words: Any, limit_s: float = 60.0) -> str:
    """Say something to containerd, of Kubernetes' containers."""
    client = ("ctr", "-a", "/run/containerd/containerd.sock", "-n", "k8s.io")
    return sandbox.run(*client, *words, limit_s=limit_s)


def _wait_for_containerd(sandbox: Sandbox) -> None:
    deadline = time.monotonic() + UP_S
    while True:
        sandbox.check()
        try:
            ctr(sandbox, "version")
            return
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def pause_image(program: Path, tar: Path) -> Path:
    """An image of nothing but this program, which every pod's first container runs."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        entry = tarfile.TarInfo("pause")
        entry.mode, entry.size = 0o755, program.stat().st_size
        with program.open("rb") as content:
            files.addfile(entry, content)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    manifest = [{"Config": "config.json", "RepoTags": [PAUSE], "Layers": ["layer.tar"]}]
    with tarfile.open(tar, "w") as image:
        for name, content_ in (
            ("config.json", config),
            ("manifest.json", json.dumps(manifest).encode()),
            ("layer.tar", layer.getvalue()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content_)
            image.addfile(entry, io.BytesIO(content_))
    return tar
