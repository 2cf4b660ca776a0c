"""A gateway of the test's cluster, and what thin clients need to know of it."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.access import TokenFile
from alchemist_ray.gateway.server.actor import GatewayInfo
from tests.support import commands
from tests.support.thin_clients import NOT_ON_CLIENTS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="package")
def tokens(folder: Path) -> TokenFile:
    made = TokenFile(folder / "tokens.json")
    made.create("nobody")
    return made


@contextmanager
def serving(folder: Path, tokens: TokenFile) -> Iterator[GatewayInfo]:
    """A gateway with TLS on a free port of loopback; its files are in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))  # for the certificate
        audit = str(folder / "audit.log")
        info = actor.serve("127.0.0.1", 0, tokens=str(tokens.path), audit=audit, certfile=None)
    yield info
    info.stop()


@pytest.fixture(scope="package")
def gateway(cluster: str, folder: Path, tokens: TokenFile) -> Iterator[GatewayInfo]:
    with serving(folder, tokens) as info:
        yield info


@pytest.fixture(scope="package")
def token(tokens: TokenFile) -> str:
    """A token of user anna that may run code and use files."""
    return tokens.create("anna", ("call", "run_code", "files"))


@pytest.fixture(scope="package")
def there(gateway: GatewayInfo, token: str) -> dict[str, Any]:
    """Options of anna's sessions through the gateway."""
    return {"address": gateway.address, "token": token}


Client = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def client(there: dict[str, Any], tmp_path: Path) -> Client:
    """Runs a program in a process where neither Ray nor MPI can be imported."""

    def run(
        program: str, *blocked: str, code: int | None = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return commands.python(
            blocking(*blocked) + textwrap.dedent(program),
            code=code,
            cwd=tmp_path,
            env=thin_environment(there, **environment),
        )

    return run


def blocking(*more: str) -> str:
    """The beginning of a program that cannot import what a thin client does not have."""
    return f"import sys; sys.modules.update(dict.fromkeys({[*NOT_ON_CLIENTS, *more]}))\n"


def thin_environment(there: dict[str, Any], **more: str) -> dict[str, Any]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {
        **kept,
        "ALCHEMIST_ADDRESS": there["address"],
        "ALCHEMIST_TOKEN": there["token"],
        "PYTHONPATH": str(ROOT),
        **more,
    }
