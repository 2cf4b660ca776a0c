"""A gateway of the test's cluster, and what thin clients need to know of it."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.access import TokenFile
from alchemist_ray.gateway.server.actor import GatewayInfo
from tests.support import commands
from tests.support.thin_clients import NOT_ON_CLIENTS

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 100.0


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="package")
def tokens(folder: Path) -> TokenFile:
    made = TokenFile(folder / "tokens.json")
    made.create("nobody")
    return made


@pytest.fixture(scope="package")
def gateway(cluster: str, folder: Path, tokens: TokenFile) -> Iterator[GatewayInfo]:
    """A gateway with TLS on a free port of loopback."""
    home, os.environ["HOME"] = os.environ.get("HOME"), str(folder)
    try:
        info = actor.serve(
            "127.0.0.1", 0, tokens=str(tokens.path), audit=str(folder / "audit.log"),
            certfile=None,
        )  # fmt: skip
    finally:
        if home is not None:
            os.environ["HOME"] = home
    yield info
    info.stop()


@pytest.fixture(scope="package")
def token(tokens: TokenFile) -> str:
    """A token of user anna that may run code and use files."""
    return tokens.create("anna", ("call", "run_code", "files"))


@pytest.fixture
def thin(gateway: GatewayInfo, token: str) -> Iterator[AlchemistSession]:
    """A session of 2 workers through the gateway."""
    with AlchemistSession(2, address=gateway.address, token=token) as session:
        yield session


Client = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def client(gateway: GatewayInfo, token: str, tmp_path: Path) -> Client:
    """Runs a program in a process where neither Ray nor MPI can be imported."""

    def run(program: str, *blocked: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return commands.python(
            blocking(*blocked) + textwrap.dedent(program),
            limit_s=TIMEOUT_S,
            cwd=tmp_path,
            env=thin_environment(gateway, token, **environment),
        )

    return run


def blocking(*more: str) -> str:
    """The beginning of a program that cannot import what a thin client does not have."""
    return f"import sys; sys.modules.update(dict.fromkeys({[*NOT_ON_CLIENTS, *more]}))\n"


def thin_environment(gateway: GatewayInfo, token: str, **more: str) -> dict[str, Any]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {
        **kept,
        "ALCHEMIST_ADDRESS": gateway.address,
        "ALCHEMIST_TOKEN": token,
        "PYTHONPATH": str(ROOT),
        **more,
    }
