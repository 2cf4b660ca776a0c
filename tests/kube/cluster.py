"""A Kubernetes of one node with KubeRay in it, and what an operator does with it.

with Cluster(images=[tar]) as cluster:
    cluster.kubectl("apply", "-f", "-", given=text)
    cluster.wait_for("a ready cluster", lambda: ..., limit_s=300)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.kube import addons, binaries, credentials, node, server
from tests.kube.sandbox import Sandbox
from tests.kube.timings import Timings
from tests.support import commands

Map = dict[str, Any]
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
SMALL = {"cpus": 1, "memory": "2Gi", "headCpus": "1", "headMemory": "3Gi", "storage": "2Gi"}
UP_S = 180.0
RAY_UP_S = 400.0
GONE_S = 240.0  # a namespace with all that is in it


class Cluster(commands.System):
    """It comes up in half a minute and leaves nothing (a context manager).

    Raises `RuntimeError` with the daemons' last words if it does not come up.
    """

    def __init__(self, images: list[Path], timings: Timings) -> None:
        self.timings = timings
        self._images = images
        self._binary = binaries.CONTROL_PLANE.get() / "controlplane"
        self.sandbox = Sandbox()

    def close(self) -> None:
        """End all of it. Raises `RuntimeError` if anything is left."""
        with self.timings("torn down, nothing left"):
            self.sandbox.close()

    def start(self) -> None:
        """Start Kubernetes and what is added to it."""
        planes, operator, dns = (
            part.get() for part in (binaries.CONTROL_PLANE, binaries.OPERATOR, binaries.DNS)
        )
        with self.timings("etcd, API server, controllers, scheduler"):
            credentials.make(self.sandbox.folder / "keys")
            server.start(self.sandbox, self._binary)
        with self.timings("containerd, with the image imported; kubelet; node ready"):
            node.start(self.sandbox, planes, self._images)
            self.wait_for("the node", self._node_is_ready, UP_S)
        with self.timings("CoreDNS, KubeRay's resources and operator"):
            addons.start_dns(self.sandbox, dns)
            self.apply(addons.PODGROUPS)
            for folder in (planes, operator):
                self.kubectl("apply", "--server-side", "-f", folder / "manifests")
            self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
            addons.start_operator(self.sandbox, operator)
            addons.start_policies(self.sandbox)

    def _node_is_ready(self) -> bool:
        nodes = self.get("nodes")["items"]
        conditions = nodes[0]["status"]["conditions"] if nodes else []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def restart_operator(self, *flags: str) -> None:
        """The operator again, with other flags."""
        self.sandbox.stop("operator")
        addons.start_operator(self.sandbox, binaries.OPERATOR.get(), *flags)

    def start_fakes(self) -> None:
        """KWOK, for nodes and pods that only seem to be."""
        addons.start_fakes(self.sandbox, binaries.FAKES.get())

    # --- what an operator says ---

    @property
    def _config(self) -> str:
        return str(self.sandbox.folder / "keys" / "admin.kubeconfig")

    def kubectl(self, *words: Any, limit_s: float = 120.0, **options: Any) -> str:
        """The output of kubectl, see `commands.output`. Raises `RuntimeError` if it fails."""
        command = [self._binary, "kubectl", *words]
        return self.sandbox.run(*command, limit_s=limit_s, KUBECONFIG=self._config, **options)

    def helm(self, *words: Any) -> str:
        """The output of Helm. Raises `RuntimeError` if it fails."""
        home = str(self.sandbox.folder / "helm")
        return self.sandbox.run(
            binaries.PACKAGES.get() / "helm", *words, limit_s=120.0, KUBECONFIG=self._config,
            HELM_CACHE_HOME=home, HELM_CONFIG_HOME=home, HELM_DATA_HOME=home,
        )  # fmt: skip

    def make_namespace(self, name: str) -> None:
        """A namespace under the `restricted` level, as the README makes it."""
        self.kubectl("create", "namespace", name)
        level = "pod-security.kubernetes.io/enforce=restricted"
        self.kubectl("label", "namespace", name, level)

    def wait_until_ready(self, namespace: str, pods: int) -> None:
        """Wait until it has so many pods, all of them ready."""
        self.wait_for(f"{pods} ready pods", lambda: self.is_ready(namespace, pods), RAY_UP_S)

    def delete(self, *namespaces: str) -> None:
        """Delete namespaces, with all that is in them."""
        self.kubectl("delete", "namespace", *namespaces, "--ignore-not-found", limit_s=GONE_S)

    def chart(self, name: str, **values: Any) -> list[Map]:
        """The chart's objects for small pods, and these values, in a namespace of its name."""
        values = SMALL | values
        given = self.sandbox.folder / f"{name}.json"
        given.write_text(json.dumps(values))
        where = ("--namespace", name, "--values", given)
        text = self.helm("template", name, ROOT / "kuberay" / "chart", *where)
        return [one for one in yaml.safe_load_all(text) if one is not None]

    def get(self, *words: Any) -> Map:
        """Objects, or one."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def apply(self, objects: list[Map]) -> None:
        """Objects, as `kubectl apply -f -` would."""
        self.kubectl("apply", "-f", "-", given="\n".join(f"---\n{json.dumps(o)}" for o in objects))

    def kustomized(self, name: str, text: str) -> Path:
        """A folder with a site's own kustomization beside a copy of ``kuberay/``."""
        folder = self.sandbox.folder / "sites" / name
        shutil.copytree(ROOT / "kuberay", folder / "kuberay")
        (folder / "kustomization.yaml").write_text(text)
        return folder

    # --- what there is ---

    def pods(self, namespace: str, component: str = "") -> list[Map]:
        """Pods of a namespace; only those of a component ("head", "worker")."""
        labels = f"app.kubernetes.io/component={component}" if component else ""
        return self.get("pods", "-n", namespace, "-l", labels)["items"]

    def is_ready(self, namespace: str, pods: int) -> bool:
        """Whether this many pods are there, and all of them ready."""
        found = self.pods(namespace)
        ready = [
            all(c["ready"] for c in pod["status"].get("containerStatuses", [{"ready": False}]))
            for pod in found
        ]
        return len(found) == pods and all(ready)

    def head(self, namespace: str) -> str:
        """The head pod's name."""
        return self.pods(namespace, "head")[0]["metadata"]["name"]

    def python(self, namespace: str, program: str, limit_s: float = 300.0) -> str:
        """Run a program in the head pod; what it prints. Raises `RuntimeError` if it fails."""
        where = ("-n", namespace, "-i", self.head(namespace), "-c", "ray-head")
        return self.kubectl("exec", *where, "--", "python", "-", given=program, limit_s=limit_s)

    def begin(self, namespace: str, program: str) -> subprocess.Popen[str]:
        """Start a program in the head pod that goes on; it prints to a pipe."""
        where = ("-n", namespace, self.head(namespace), "-c", "ray-head")
        words = [self._binary, "kubectl", "exec", *where, "--", "python", "-uc", program]
        return subprocess.Popen(
            self.sandbox.enter(*words),
            env=self.sandbox.environment({"KUBECONFIG": self._config}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @contextmanager
    def forwarded(self, namespace: str, port: int) -> Iterator[None]:
        """While `kubectl port-forward` brings a port of Ray's head to the sandbox's loopback."""
        where = ("-n", namespace, "service/alchemist-head-svc", port)
        words = (self._binary, "kubectl", "port-forward", *where)
        self.sandbox.start("port-forward", *words, KUBECONFIG=self._config)
        try:
            yield
        finally:
            self.sandbox.stop("port-forward")

    def wait_for(self, what: str, settled: Callable[[], T], limit_s: float) -> T:
        """Wait until something is so. Raises `AssertionError` with how things stand."""
        deadline = time.monotonic() + limit_s
        while True:
            self.sandbox.check()
            if found := settled():
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not in {limit_s:.0f} s\n{self.state()}")
            time.sleep(1.0)

    def state(self) -> str:
        """How things stand, for who wonders why."""
        said = [self.kubectl("get", "raycluster,rayjob,pods", "-A", "-o", "wide", code=None)]
        said.append(
            self.kubectl("get", "events", "-A", "--sort-by=.lastTimestamp", code=None)[-5000:]
        )
        said.append(self.sandbox.said("operator"))
        return "\n".join(said)
