"""The distribution alchemist-client: built, and run where there is only NumPy and msgpack."""

from __future__ import annotations

import os
import shutil
import venv
import zipfile
from pathlib import Path

import msgpack
import numpy as np
import pytest

from alchemist_ray.gateway.server.actor import GatewayInfo
from alchemist_ray.gateway.wheel import contents
from tests.alchemist_ray.gateway.conftest import ROOT
from tests.support import commands
from tests.support.build import uv_build

LIMIT_NBYTES = 10 << 20  # 10 MiB

PROGRAM = """
import importlib.util
import numpy as np
import alchemist_ray
from alchemist_ray import *

assert "site-packages" in alchemist_ray.__file__
assert not hasattr(alchemist_ray, "status")
assert not any(map(importlib.util.find_spec, ("ray", "mpi4py", "scipy", "cloudpickle", "tqdm")))
als = AlchemistSession()
als.connect_to_alchemist("127.0.0.1", {port})
als.request_workers(2)
A = np.random.default_rng(0).random((200, 30))
handle = als.send_matrix(matrix=A, print_times=True, layout="VC_STAR")
S, U, V = als.load_library("linalg").truncated_svd(handle, 4)
assert np.allclose(als.fetch_matrix(S), np.linalg.svd(A, compute_uv=False)[:4])
assert np.allclose(np.asarray(np.exp(handle) + 1), np.exp(A) + 1)
for missing in (handle.to_dask, handle.to_dataset, handle.to_spark):
    try:
        missing()
    except alchemist_ray.AlchemistError as error:
        assert "alchemist-on-ray" in str(error), error
    else:
        raise AssertionError(missing)
als.stop()
print("done")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = ROOT / "alchemist_ray/gateway/wheel"
    out = uv_build(folder, tmp_path_factory.mktemp("wheel"), "--wheel")
    (built,) = out.glob("alchemist_client-*.whl")
    return built


def test_the_wheel_is_small_and_has_only_what_clients_import(wheel: Path) -> None:
    assert wheel.stat().st_size < LIMIT_NBYTES
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        required = [
            line.split(":")[1].strip()
            for line in archive.read(metadata).decode().splitlines()
            if line.startswith("Requires-Dist") and "extra ==" not in line
        ]
    assert {name.partition(">")[0] for name in required} == {"numpy", "msgpack"}
    assert names == {*contents.files(), "alchemist_ray/LICENSE"}
    assert not any("/server/" in name or name.endswith("driver.py") for name in names)


def test_a_session_runs_from_the_wheel(
    wheel: Path, gateway: GatewayInfo, token: str, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    found = [Path(np.__file__).parent, Path(msgpack.__file__).parent]
    for package in (*found, found[0].with_name("numpy.libs")):
        if package.exists():
            (packages / package.name).symlink_to(package)
    kept = {key: os.environ[key] for key in ("PATH", "TMPDIR") if key in os.environ}
    said = commands.output(
        tmp_path / "venv/bin/python", "-c", PROGRAM.format(port=gateway.port), cwd=tmp_path,
        env={**kept, "ALCHEMIST_TOKEN": token},
    )  # fmt: skip
    assert said.endswith("done\n")
    shutil.rmtree(tmp_path / "venv")
