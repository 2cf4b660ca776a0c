"""`kuberay/overlays/gateway`: a client outside computes on a gang, through a forwarded port."""

from __future__ import annotations

import sys

from alchemist_ray.gateway.protocol import PORT
from alchemist_ray.gateway.server.access import TokenFile
from tests.kube.cluster import ROOT, Cluster

NAMESPACE = "alchemist"
SECRET = "alchemist-gateway"
CLIENT = """
import numpy as np
from alchemist_ray import AlchemistSession

A = np.random.default_rng(0).random((400, 30))
with AlchemistSession(2, strategy="STRICT_SPREAD", start_timeout_s=400) as als:
    handle = als.send_matrix(A)
    S, U, V = als.load_library("linalg").truncated_svd(handle, rank=5)
    print(np.allclose(S.fetch(), np.linalg.svd(A, compute_uv=False)[:5]))
    print(np.array_equal(handle.fetch(), A), len({one.hostname for one in als.list_workers()}))
"""


def test_a_client_computes_through_a_forwarded_port(kube: Cluster) -> None:
    tokens = kube.sandbox.folder / "tokens.json"
    client = {
        "ALCHEMIST_ADDRESS": f"alchemist://localhost:{PORT}",
        "ALCHEMIST_TOKEN": TokenFile(tokens).create("anna"),
        "PYTHONPATH": str(ROOT),
    }
    kube.make_namespace(NAMESPACE)
    with kube.timings("the gateway overlay: head, its gateway, and 2 worker pods ready"):
        kube.kubectl("create", "-n", NAMESPACE, "secret", "generic", SECRET,
                     f"--from-file=tokens.json={tokens}")  # fmt: skip
        kube.kubectl("apply", "-k", ROOT / "kuberay" / "overlays" / "gateway")
        kube.wait_until_ready(NAMESPACE, 3)
    with kube.forwarded(NAMESPACE, PORT), kube.timings("a client outside: from start to results"):
        told = kube.sandbox.run(sys.executable, "-c", CLIENT, limit_s=500, **client)
    assert told == "True\nTrue 2\n"
    kube.delete(NAMESPACE)
