"""Credentials for the API server: its certificate, and a token for each component."""

from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path

from tests.kube.sandbox import NODE_IP

NODE = "node-a"
SERVICE_IP = "10.96.0.1"
PORT = 6443
# Component: its user and group, as Kubernetes' own rules know them.
USERS = {
    "admin": ("admin", "system:masters"),
    "controllers": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kubelet": (f"system:node:{NODE}", "system:nodes"),
    "proxy": ("system:kube-proxy", ""),
}
NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")


def make(folder: Path) -> None:
    """Keys, certificates, ``tokens.csv`` and ``NAME.kubeconfig`` for each component."""
    folder.mkdir(mode=0o700)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    for name in ("sa", "ca", "api"):
        openssl("genrsa", "-out", f"{name}.key", "2048")
    openssl("req", "-x509", "-new", "-key", "ca.key", "-subj", "/CN=test", "-out", "ca.crt")
    openssl("req", "-new", "-key", "api.key", "-subj", "/CN=kube-apiserver", "-out", "api.csr")
    hosts = [f"DNS:{name}" for name in NAMES]
    hosts += [f"IP:{address}" for address in ("127.0.0.1", SERVICE_IP, NODE_IP)]
    (folder / "names").write_text(f"subjectAltName={','.join(hosts)}\n")
    openssl(
        *("x509", "-req", "-in", "api.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-extfile", "names", "-out", "api.crt"),
    )
    lines = []
    for name, (user, group) in USERS.items():
        token = secrets.token_hex(16)
        lines.append(f"{token},{user},{name},{group}\n")
        config = {
            "apiVersion": "v1", "kind": "Config",
            "clusters": [{"name": "test", "cluster": {
                "server": f"https://{NODE_IP}:{PORT}",
                "certificate-authority": str(folder / "ca.crt"),
            }}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": "test", "user": name}}],
            "current-context": name,
        }  # fmt: skip
        (folder / f"{name}.kubeconfig").write_text(json.dumps(config))
    (folder / "tokens.csv").write_text("".join(lines))
