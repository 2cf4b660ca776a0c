"""The head's own command with a gateway, run here as KubeRay runs it in the pod."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AuthError, SessionError
from alchemist_ray.gateway.protocol import PORT
from alchemist_ray.gateway.server.access import TokenFile, certificate
from tests.deploy.kuberay import kustomize
from tests.deploy.kuberay.folders import ROOT, by_name
from tests.support import commands
from tests.support.traces import free_port, wait_until

UP_S = 90.0
GATEWAY_FOLDER = "/var/run/secrets/alchemist-gateway"


@pytest.mark.parametrize("given", [False, True], ids=["generated certificate", "given certificate"])
def test_the_heads_command_starts_ray_and_a_gateway(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = by_name(kustomize.build(ROOT / "overlays" / "gateway"))["RayCluster", "alchemist"]
    (container,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    port, gcs = free_port(), free_port()
    secret = tmp_path / "secret"
    (text,) = container["args"]
    text = text.replace(GATEWAY_FOLDER, str(secret)).replace(f" {PORT} ", f" {port} ")
    probe = container["readinessProbe"]["exec"]["command"]
    assert f":{PORT:04X} " in probe[-1]
    probe = [*probe[:-1], probe[-1].replace(f":{PORT:04X} ", f":{port:04X} ")]

    def ready() -> subprocess.CompletedProcess[str]:
        return commands.run(*probe, limit_s=30)

    ray = f"ray start --head --block --port={gcs} --num-cpus=2 --include-dashboard=false"
    ray += f" --temp-dir={tempfile.mkdtemp(prefix='r')}"  # else ray.init() of other tests joins it
    env = {key: value for key, value in os.environ.items() if key != "ALCHEMIST_TOKENS"}
    env |= {one["name"]: one["value"] for one in container["env"]} | {
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "KUBERAY_GEN_RAY_START_CMD": ray,
        "RAY_ADDRESS": f"127.0.0.1:{gcs}",
    }
    if given:
        monkeypatch.setenv("HOME", str(tmp_path / "other"))
        secret.mkdir()
        for path, name in zip(certificate(None, None), ("tls.crt", "tls.key"), strict=True):
            path.rename(secret / name)
    log = tmp_path / "log.txt"
    with log.open("wb") as out:
        head = subprocess.Popen(
            ["/bin/bash", "-c", text], env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        address = f"alchemist://127.0.0.1:{port}"
        waits = wait_until(lambda: "no file of tokens" in log.read_text(), UP_S)
        assert waits is not None, log.read_text()
        assert "no gateway listens" in ready().stdout
        secret.mkdir(exist_ok=True)
        token = TokenFile(secret / "tokens.json").create("anna")  # the Secret may come later
        up = wait_until(lambda: "fingerprint" in log.read_text(), UP_S)
        assert up is not None, log.read_text()
        assert ready().returncode == 0
        with pytest.raises((AuthError, SessionError), match="unknown token"):
            AlchemistSession(1, address=address, token="alch_" + "0" * 12 + "_" + "0" * 64)
        found = re.findall("^fingerprint +([0-9a-f]{64})$", log.read_text(), re.M)
        with AlchemistSession(2, address=f"{address}?fingerprint={found[0]}", token=token) as als:
            assert float(als.send_matrix(np.eye(4)).sum()) == 4
        own = tmp_path / ".config/alchemist/gateway/certificate.pem"
        assert own.exists() is not given
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(30)
        finally:
            if head.poll() is None:
                os.killpg(head.pid, signal.SIGKILL)
                head.wait()
